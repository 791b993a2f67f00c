"""What layout operations, contractions, scaling and casts do to a `Form` (see `terms`).

Pure Python; joins are in `joins`, sums in `elementwise`. Each function raises `Unaligned` when sizes do not factor
over one another; the caller then knows only the shape of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from .laid import lay
from .sizes import Size, Unaligned, product, quotient, same
from .substitution import DEPTH, Change, Pin, Slice, Split, change, change_term, overlapping, prune
from .terms import (
    Axis,
    Digit,
    Dim,
    Form,
    Join,
    Product,
    Read,
    Sum,
    Term,
)


def leaf(source: Hashable, shape: Sequence[Size]) -> Form:
    """A tensor of which nothing is known but its shape."""
    dims = tuple(() if same(size, 1) else (Axis(size),) for size in shape)
    return Form(dims, read_of(source, dims))


def read_of(source: Hashable, dims: Sequence[Dim], depends: frozenset[Axis] | None = None) -> Term:
    """The term of a tensor with these axes. Axes not in `depends` are pinned at 0: the tensor repeats along them."""

    def digit(axis: Axis) -> Digit:
        return Digit(axis if depends is None or axis in depends else None, axis.size)

    return Term(Read(source, tuple(tuple(digit(axis) for axis in dim) for dim in dims)))


def alike(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are made of axes of the same sizes."""
    return len(a) == len(b) and all(same(x.size, y.size) for x, y in zip(a, b, strict=True))


def view(form: Form, shape: Sequence[Size]) -> Form:
    """The same elements in the same order under another shape."""
    changes: dict[Axis, Change] = {}
    pending = [axis for dim in form.dims for axis in dim][::-1]
    dims: list[list[Axis]] = []
    for size in shape:
        need, axes = size, list[Axis]()
        while not same(need, 1):
            if not pending:
                raise Unaligned(f"{form.shape} has no axis left for a dimension of {size}")
            axis = pending.pop()
            if (rest := quotient(need, axis.size)) is not None:
                axes.append(axis)
                need = rest
            elif (rest := quotient(axis.size, need)) is not None:
                slow, fast = Axis(need), Axis(rest)
                changes[axis] = Split(slow, fast)
                axes.append(slow)
                pending.append(fast)
                need = 1
            else:
                raise Unaligned(f"{axis.size} and {need} do not provably divide one another")
        dims.append(axes)
    if pending:
        raise Unaligned(f"{form.shape} has more elements than {tuple(shape)}")
    term = form.term
    for axis, split in changes.items():  # in order: a later one may split the fast half of an earlier one
        term = change_term(term, {axis: split})
    return Form(tuple(tuple(axes) for axes in dims), term)


def fresh(form: Form) -> Form:
    """The same tensor over new axes, so that two uses of one tensor do not share axes."""
    return change(form, {axis: Axis(axis.size) for dim in form.dims for axis in dim})


def permute(form: Form, order: Sequence[int]) -> Form:
    """The dimensions in another order."""
    return replace(form, dims=tuple(form.dims[i] for i in order))


def take(form: Form, dim: int, start: Size, size: Size, step: int = 1) -> Form:
    """`size` indices of dimension `dim`, from `start` in steps of `step`."""
    whole = form.shape[dim]
    if step == 1 and same(start, 0) and same(size, whole):
        return form
    axes = form.dims[dim]
    if not axes:
        raise Unaligned("an empty slice")
    parts = form.term.parts
    if isinstance(parts, Join) and axes == (parts.axis,) and step == 1:
        pieces = overlapping(parts.segments, start, size)
        if len(pieces) == 1:  # a single piece: its axes, however many, take the place of the joined axis
            return Form((*form.dims[:dim], pieces[0].axes, *form.dims[dim + 1 :]), pieces[0].term)
    slowest, faster = axes[0], product(axis.size for axis in axes[1:])
    count, begin = quotient(size, faster), quotient(start, faster)
    if count is None or begin is None or (step != 1 and len(axes) > 1):
        if step == 1 and all(isinstance(known, int) for known in (start, size, faster)):
            index, rest = divmod(int(start), int(faster))
            if rest + size <= faster:
                return take(change(form, {slowest: Pin(index)}), dim, rest, size)
        if len(axes) == 1:
            raise Unaligned(f"a slice of {size} from {start} cuts through an axis of {faster}")
        if len(axes) == 2 and same(step, faster) and same(size, slowest.size) and isinstance(start, int):
            return change(form, {axes[1]: Pin(start)})  # one of each `faster`; another start would leave fewer
        return take(lay(form, dim), dim, start, size, step)
    if same(count, 1):
        return change(form, {slowest: Pin(begin)})
    return change(form, {slowest: Slice(Axis(count), begin, step)})


def select(form: Form, dim: int, index: Size) -> Form:
    """Index `index` of dimension `dim`, which is removed."""
    taken = take(form, dim, index, 1)
    return replace(taken, dims=taken.dims[:dim] + taken.dims[dim + 1 :])


def expand(form: Form, shape: Sequence[Size]) -> Form:
    """Broadcast to `shape`, aligned at the last dimension."""
    dims: list[Dim] = [()] * (len(shape) - len(form.dims)) + list(form.dims)
    for i, size in enumerate(shape):
        if not dims[i] and not same(size, 1):
            dims[i] = (Axis(size),)
    return replace(form, dims=tuple(dims))


def repeat(form: Form, counts: Sequence[Size]) -> Form:
    """Tile each dimension `counts[i]` times, aligned at the last dimension."""
    dims: list[Dim] = [()] * (len(counts) - len(form.dims)) + list(form.dims)
    for i, count in enumerate(counts):
        if not same(count, 1):
            dims[i] = (Axis(count), *dims[i])
    return replace(form, dims=tuple(dims))


def _renamed(left: Form, right: Form, pairs: Sequence[tuple[int, int]]) -> dict[Axis, Axis]:
    """For each axis of `right` that `unify` renames, that of `left`: in pairs of dimensions that are divided alike."""
    names: dict[Axis, Axis] = {}
    for i, j in pairs:
        if alike(left.dims[i], right.dims[j]):
            for own, other in zip(right.dims[j], left.dims[i], strict=True):
                names.setdefault(own, other)
    return {own: other for own, other in names.items() if own is not other}


def unify(left: Form, right: Form, pairs: Sequence[tuple[int, int]]) -> tuple[Form, Form]:
    """Give paired dimensions the same axes: dimension i of `left` and j of `right` for each pair.

    A dimension of size 1 pairs with any other: it is a broadcast. Raises Unaligned if sizes do not factor alike.
    """
    right = change(right, _renamed(left, right, pairs))
    for i, j in pairs:
        if not left.dims[i] or not right.dims[j]:
            continue
        position = 0
        while position < len(left.dims[i]) or position < len(right.dims[j]):
            if position >= len(left.dims[i]) or position >= len(right.dims[j]):
                raise Unaligned(f"dimensions of {left.shape[i]} and {right.shape[j]} differ")
            a, b = left.dims[i][position], right.dims[j][position]
            if a is b:
                pass
            elif same(a.size, b.size):
                right = change(right, {b: a})
            elif (rest := quotient(a.size, b.size)) is not None:
                left = change(left, {a: Split(b, Axis(rest))})
            elif (rest := quotient(b.size, a.size)) is not None:
                right = change(right, {b: Split(a, Axis(rest))})
            else:
                raise Unaligned(f"axes of {a.size} and {b.size} do not provably divide one another")
            position += 1
    return left, right


def contract(
    source: Hashable,
    left: Form,
    right: Form,
    batch: Sequence[tuple[int, int]],
    summed: tuple[int, int],
    *,
    scale: float = 1.0,
) -> Form:
    """The matrix product `source`, `scale * left @ right`: dims are the batch pairs, then what is left of each side."""
    left, right = unify(fresh(left), fresh(right), [*batch, summed])  # fresh: no other form may have the summed axes
    together = left.dims[summed[0]] or right.dims[summed[1]]
    batched = tuple(left.dims[i] or right.dims[j] for i, j in batch)
    rows = tuple(dim for i, dim in enumerate(left.dims) if i != summed[0] and i not in {i for i, _ in batch})
    columns = tuple(dim for j, dim in enumerate(right.dims) if j != summed[1] and j not in {j for _, j in batch})
    return contraction(source, (*batched, *rows, *columns), left.term, right.term, together, scale=scale)


def contraction(
    source: Hashable, dims: Sequence[Dim], left: Term, right: Term, summed: Dim, *, scale: float = 1.0
) -> Form:
    """The form of `source`, `scale * sum over summed of left * right`, over the axes `dims`."""
    parts = Product(prune(left, DEPTH), prune(right, DEPTH), summed, scale)
    return Form(tuple(dims), replace(read_of(source, dims, Term(read_of(source, dims).read, parts).axes), parts=parts))


def align(forms: Sequence[Form], labels: Sequence[Sequence[Hashable]]) -> tuple[list[Form], dict[Hashable, Dim]]:
    """Give dimensions with the same label the same axes in all forms, and all others axes of their own.

    `labels[k][i]` names dimension i of form k. Returns the forms and the axes of each label. A dimension of size 1
    keeps no axes: it is broadcast along its label.
    """
    names = list(dict.fromkeys(label for form_labels in labels for label in form_labels))
    place = {label: i for i, label in enumerate(names)}
    common = Form(tuple(() for _ in names), read_of(None, ()))
    aligned = [fresh(form) for form in forms]
    for _ in range(2):  # the second round hands the finest axes back to the first forms
        for k, form in enumerate(aligned):
            pairs = [(place[label], i) for i, label in enumerate(labels[k])]
            common, aligned[k] = unify(common, form, pairs)
            dims = list(common.dims)
            for i, j in pairs:
                dims[i] = dims[i] or aligned[k].dims[j]
            common = replace(common, dims=tuple(dims))
    return aligned, dict(zip(names, common.dims, strict=True))


def piece_of(term: Term, axis: Axis, start: Size, axes: Dim) -> Term:
    """The part of a term that starts at `start` of `axis`, with that axis replaced by the product of `axes`."""
    whole = Axis(product(a.size for a in axes))
    part = change_term(term, {axis: Slice(whole, start)})
    for k, slow in enumerate(axes[:-1]):
        fast = Axis(product(a.size for a in axes[k + 1 :]))
        part = change_term(part, {whole: Split(slow, fast)})
        whole = fast
    return change_term(part, {whole: axes[-1] if axes else Pin(0)})


def term_of(form: Form, read: Read) -> Term:
    """The element that a read of a tensor names, where `form` describes that tensor.

    Raises: Unaligned, if the read divides the tensor's dimensions otherwise.
    """
    term, changes = form.term, dict[Axis, Change]()
    for digits, axes in zip(read.dims, form.dims, strict=True):
        if len(digits) > 1 and len(axes) == 1:
            parts = tuple(Axis(digit.extent) for digit in digits)
            term = piece_of(term, axes[0], digits[0].before, parts)
            digits, axes = (replace(digits[0], before=0, after=0), *digits[1:]), parts
        elif len(digits) > len(axes):
            term, axes = _divided(term, axes, [digit.extent for digit in digits])
        if len(digits) != len(axes):
            raise Unaligned("a dimension that was split into other parts")
        for digit, axis in zip(digits, axes, strict=True):
            if not same(digit.extent, axis.size):
                raise Unaligned("a dimension that was split into other parts")
            if digit.axis is None:
                changes[axis] = Pin(digit.start)
            else:
                changes[axis] = digit.axis if digit.whole else Slice(digit.axis, digit.start, digit.step)
    term = change_term(term, changes)
    return replace(term, read=replace(term.read, then=(*term.read.then, *read.then)))


def _divided(term: Term, axes: Dim, extents: Sequence[Size]) -> tuple[Term, Dim]:
    """The term over axes with these extents in place of `axes`, each of which is the product of some new ones."""
    found: list[Axis] = []
    rest = list(extents)
    for axis in axes:
        own: list[Size] = []
        while rest and not (own and same(product(own), axis.size)):
            own.append(rest.pop(0))
        if not same(product(own), axis.size):
            raise Unaligned("a dimension that was split into other parts")
        parts = (axis,) if len(own) == 1 else tuple(map(Axis, own))
        if len(own) > 1:
            term = piece_of(term, axis, 0, parts)
        found += parts
    return term, tuple(found)


def scaled(form: Form, factor: float) -> Form:
    """`factor * form`. A product keeps its factors, a sum its terms, a join its pieces."""

    def scale(term: Term) -> Term:
        if isinstance(term.parts, Product):
            return replace(term, parts=replace(term.parts, scale=term.parts.scale * factor))
        return term

    return map_terms(form, lambda term: scale(replace(term, read=_then(term.read, factor))))


def cast(form: Form, dtype: Hashable) -> Form:
    """The same elements rounded to `dtype`."""
    return map_terms(form, lambda term: replace(term, read=_then(term.read, dtype)))


def _then(read: Read, step: Hashable) -> Read:
    return replace(read, then=(*read.then, step))


def map_terms(form: Form, function: Callable[[Term], Term]) -> Form:
    """Apply `function` to the form's own term, its pieces and addends, not to the factors of a product."""

    def visit(term: Term) -> Term:
        if isinstance(term.parts, Join):
            pieces = tuple(replace(s, term=visit(s.term)) for s in term.parts.segments)
            return function(replace(term, parts=replace(term.parts, segments=pieces)))
        if isinstance(term.parts, Sum):
            return function(replace(term, parts=Sum(tuple(visit(addend) for addend in term.parts.terms))))
        return function(term)

    return replace(form, term=visit(form.term))
