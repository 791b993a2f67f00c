"""`mla-compile memory`: sizes from a config.json, bytes of each layout, the largest batch."""

import json
import sys
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest
import torch

from mla_compile import cli
from mla_compile.cache import FP8PagePool, PagePool
from mla_compile.errors import ConfigError
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.memory.layouts import fp8_bytes, layouts
from mla_compile.memory.plot import plot
from mla_compile.memory.sizes import WIDTHS, ModelSizes, Sizes, read_sizes
from mla_compile.memory.table import MemoryPlan, as_text
from mla_compile.parsing import in_bytes, tokens
from mla_compile.units import in_units

V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
HEADS = Sizes(N=128, L=512, P=128, R=64, V=128)


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)


def printed(capsys, *arguments):
    assert cli.main(["memory", *map(str, arguments), "--json"]) == 0
    return {row["layout"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_deepseek_v3_takes_a_57th_of_128_heads_of_128(config, capsys):
    rows = printed(capsys, config(**V3))
    assert rows["MHA"]["layer_bytes"] == 65_536
    assert rows["latent"]["layer_bytes"] == 1_152
    assert f"{rows['MHA']['times_latent']:.0f}" == "57"
    assert rows["expanded"]["layer_bytes"] == 81_920  # keys with their rope columns
    assert rows["GQA"]["layer_bytes"] == 2 * 8 * 128 * 2
    assert rows["latent FP8"]["layer_bytes"] == 512 + 4 * 4 + 2 * 64 == 656
    assert rows["latent"]["token_bytes"] == 70_272  # as DeepSeek's report on V3's hardware has it: 70.272 KB a token


def test_all_is_a_token_times_context_times_batch(config, capsys):
    rows = printed(capsys, config(**V3), "--context", "128k", "--batch", "16", "--memory", "80GiB")
    for row in rows.values():
        assert row["bytes"] == row["token_bytes"] * 131_072 * 16
        fitting = row["largest_batch"] * row["token_bytes"] * 131_072
        assert fitting <= 80 * 2**30 < fitting + row["token_bytes"] * 131_072
    assert (rows["latent"]["largest_batch"], rows["latent FP8"]["largest_batch"]) == (9, 16)


def test_everything_in_fp8(config, capsys):
    rows = printed(capsys, config(**V3), "--dtype", "fp8")
    assert list(rows) == ["expanded", "MHA", "GQA", "latent FP8"]
    assert (rows["expanded"]["layer_bytes"], rows["MHA"]["layer_bytes"]) == (40_960, 32_768)
    assert rows["latent FP8"]["times_latent"] == 1


def test_bytes_are_those_of_the_tensors_that_the_op_takes():
    pool = PagePool(layers=1, latent_width=512, rope_width=64, pages=1, page_size=1, dtype=torch.bfloat16)
    plain = next(layout for layout in layouts("bf16", 8) if layout.name == "latent")
    assert plain.layer_bytes(HEADS) == pool.layers[0].nbytes
    pages = torch.zeros(1, 1, 512, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    scales = torch.ones(1, 1, 4)
    queries = (torch.zeros(1, 1, 2, width, dtype=torch.bfloat16) for width in (512, 64))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    PagedLatentAttention(*queries, *pages, table, lengths, True, 1.0, scales).check()
    assert fp8_bytes(HEADS) == sum(tensor.nbytes for tensor in (*pages, scales))


@pytest.mark.parametrize(("L", "R"), [(512, 64), (192, 64), (48, 16), (256, 0)])
def test_bytes_in_fp8_are_those_of_the_pool(L, R):
    pool = FP8PagePool(layers=2, latent_width=L, rope_width=R, pages=3, page_size=4, dtype=torch.bfloat16)
    held = sum(tensor.nbytes for tensor in pool.tensors)
    assert held == 2 * 3 * 4 * fp8_bytes(Sizes(N=1, L=L, P=1, R=R, V=1))


@pytest.mark.parametrize(("L", "groups"), [(512, 4), (256, 2), (48, 1), (192, 1), (200, 1)])
def test_a_scale_serves_128_columns_or_all(L, groups):
    assert fp8_bytes(Sizes(N=1, L=L, P=1, R=0, V=1)) == L + 4 * groups


def test_no_transformers_is_needed(config, without_transformers):
    assert read_sizes(config(**V3)) == ModelSizes("deepseek_v3", {HEADS: 61})


def test_a_file_and_its_directory_are_the_same(config):
    directory = config(**V3)
    assert read_sizes(directory) == read_sizes(directory / "config.json")


def test_transformers_completes_what_the_file_leaves_out(config):
    longcat = {key: value for key, value in V3.items() if key != "num_hidden_layers"}
    assert read_sizes(config(**longcat | {"model_type": "longcat_flash", "num_layers": 3})).count == 6
    minicpm = {key: value for key, value in V3.items() if key != "v_head_dim"} | {"hidden_size": 128 * 96}
    (sizes,) = read_sizes(config(**minicpm | {"model_type": "minicpm3"})).layers
    assert sizes.V == 96


def test_layers_that_keep_no_latents(config, without_transformers):
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    fields = V3 | {"num_hidden_layers": 3, "layer_types": kinds, "linear_head_dim": 8}
    assert read_sizes(config(**fields)) == ModelSizes("deepseek_v3", {HEADS: 1}, others=2)
    shared = V3 | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "kv_source_layers": [0, 1, 1]}
    assert read_sizes(config(**shared)) == ModelSizes("deepseek_v3", {HEADS: 2}, others=1)


def test_layers_with_latents_that_a_checkpoint_numbers(config, without_transformers):
    """As those of Kimi-Linear and Kimi K3 do, from 1 on."""
    linear = {"num_heads": 96, "full_attn_layers": [2, 3], "kda_layers": [1]}
    text = V3 | {"num_hidden_layers": 3, "linear_attn_config": linear}
    assert read_sizes(config(model_type="kimi_k3", text_config=text)) == ModelSizes("kimi_k3", {HEADS: 2}, others=1)
    told = text | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    assert read_sizes(config(**told)).count == 1


def test_a_model_that_transformers_does_not_know_is_named_alone(config):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"does not know this model: Unrecognized model identifier: kimi_k9$"):
        read_sizes(config(**V3 | {"model_type": "kimi_k9", "linear_attn_config": {"num_heads": 4}}))


def test_kinds_of_layers_that_transformers_knows(config):
    kimi = read_sizes(config(**V3 | {"model_type": "kimi_linear", "num_hidden_layers": 9, "linear_head_dim": 8}))
    assert (kimi.count, kimi.others) == (2, 7)


def test_layers_of_other_sizes_that_transformers_knows(config):
    if "dots3_note_text" not in pytest.importorskip("transformers").CONFIG_MAPPING:
        pytest.skip("this transformers does not know the family")
    dots = V3 | {"model_type": "dots3_note_text", "num_hidden_layers": 3, "sliding_window": 8, "swa_kv_lora_rank": 64}
    small = Sizes(N=64, L=64, P=192, R=64, V=128, window=8)
    assert read_sizes(config(**dots)).layers == {HEADS: 2, small: 1}


def test_a_window_bounds_what_a_layer_keeps():
    model = ModelSizes("m", {HEADS: 1, Sizes(N=128, L=512, P=128, R=64, V=128, window=100): 1})
    latent = next(layout for layout in layouts("bf16", 8) if layout.name == "latent")
    assert latent.sequence_bytes(model, 1000) == 1152 * (1000 + 100)
    assert latent.sequence_bytes(model, 50) == 1152 * (50 + 50)


def test_the_text_of_a_model_with_vision(config, without_transformers):
    assert read_sizes(config(model_type="both", text_config=V3, num_hidden_layers=1)).count == 61


def test_an_indexer_is_named_and_not_counted(config, without_transformers):
    model = read_sizes(config(**V3 | {"index_head_dim": 128, "indexer_types": ["full"] + ["shared"] * 60}))
    assert (model.index_width, model.indexers) == (128, 1)
    assert "an indexer's keys, 256 bytes per token and layer in 1 layers" in as_text(
        MemoryPlan(model, 1024, 1, "bf16", 8)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, "expected the config of an MLA model, with kv_lora_rank"),
        (V3 | {"v_head_dim": None}, "expected v_head_dim in"),
        (V3 | {"linear_num_heads": 4}, "expected layer_types in"),
        (
            V3 | {"linear_attn_config": {"full_attn_layers": [0, 4]}},
            r"expected full_attn_layers in .* to be a list of layers, 1 to 61, found \[0, 4\]",
        ),
        (V3 | {"kv_lora_rank": True}, "expected kv_lora_rank in .* to be a positive whole number, found True"),
        (V3 | {"v_head_dim": "wide"}, "expected v_head_dim in .* to be a positive whole number, found 'wide'"),
        (V3 | {"layer_types": ["linear_attention"] * 61}, "expected layers that keep latents"),
        (
            V3 | {"num_hidden_layers": "61"},
            "expected num_hidden_layers in .* a positive whole number, found '61'",
        ),
        (V3 | {"num_hidden_layers": 0}, "expected num_hidden_layers in .* to be a positive whole number, found 0"),
        (V3 | {"layer_types": ["full_attention"] * 3}, "expected layer_types in .* each of 61 layers, found 3 entries"),
        (V3 | {"layer_types": "full"}, "expected layer_types in .* each of 61 layers, found 'full'"),
        (
            V3 | {"layer_types": ["full_attention"] * 61, "kv_source_layers": [0, 1]},
            "expected kv_source_layers in .* each of 61 layers, found 2 entries",
        ),
        (V3 | {"indexer_types": ["full"]}, "expected indexer_types in .* each of 61 layers, found 1 entries"),
        (V3 | {"linear_attn_config": 3}, "expected linear_attn_config in .* to be an object, found 3"),
        (V3 | {"model_type": ["x"]}, r"expected model_type in .* to be a name, found \['x'\]"),
        (V3 | {"model_type": "two\nlines"}, r"expected model_type in .* to be a name, found 'two\\nlines'"),
        (V3 | {"num_hidden_layers": 10**20}, "expected num_hidden_layers in .* to be at most 10,000, found 10+$"),
        (
            V3 | {"kv_lora_rank": 10**400},
            r"expected kv_lora_rank in .* to be at most 2,147,483,647, found 10+\.\.\.0+$",
        ),
        (
            V3 | {"num_attention_heads": 10**400},
            "expected num_attention_heads in .* to be at most 2,147,483,647, found",
        ),
        (V3 | {"qk_rope_head_dim": -1}, "expected qk_rope_head_dim in .* to be a whole number, found -1"),
    ],
)
def test_a_config_that_does_not_say_enough(fields, message, config, without_transformers):
    with pytest.raises(ConfigError, match=message):
        read_sizes(config(**fields))


@pytest.mark.parametrize("width", ["64", [1], -5, 1.5, True], ids=repr)
def test_a_width_of_an_indexer_that_is_none(width, config, without_transformers):
    with pytest.raises(ConfigError, match=r"expected index_head_dim in .* to be a positive whole number, found"):
        read_sizes(config(**V3 | {"index_head_dim": width}))


@pytest.mark.parametrize("window", ["8", [8], -4, 1.5, 0], ids=repr)
def test_a_window_that_is_none_matters_to_layers_that_slide(window, config, without_transformers):
    sliding = {"layer_types": ["sliding_attention"] * 61}
    with pytest.raises(ConfigError, match=r"expected sliding_window in .* to be a positive whole number, found"):
        read_sizes(config(**V3 | sliding | {"sliding_window": window}))
    assert read_sizes(config(**V3 | {"sliding_window": window})).layers == {HEADS: 61}
    assert read_sizes(config(**V3 | sliding | {"sliding_window": None})).layers == {HEADS: 61}


@pytest.mark.parametrize("own", [[1], "x", {"a": {}}, {"0": 3}, {"61": {}}, {"-1": {}}, {"1": {}, "01": {}}], ids=repr)
def test_sizes_of_single_layers_are_objects_by_their_numbers(own, config, without_transformers):
    with pytest.raises(ConfigError, match=r"expected per_layer_config in .* to be (an object, found|objects by)"):
        read_sizes(config(**V3 | {"per_layer_config": own}))


@pytest.mark.parametrize(
    "own", [None, {}, {"0": {}, "60": {"kv_lora_rank": 64}}, {"060": {"kv_lora_rank": 64}}], ids=repr
)
def test_sizes_of_single_layers(own, config, without_transformers):
    """transformers pads their numbers with zeros."""
    others = {HEADS: 60, replace(HEADS, L=64): 1} if own else {HEADS: 61}
    assert read_sizes(config(**V3 | {"per_layer_config": own})).layers == others


def test_a_config_that_transformers_cannot_read(config):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"expected v_head_dim in .*, found none; transformers refuses the config: "):
        read_sizes(config(**V3 | {"v_head_dim": None, "per_layer_config": [1]}))


@pytest.mark.parametrize("name", ["--context", "--batch", "--memory", "--kv-heads"])
def test_numbers_as_large_as_64_bits_hold_and_no_larger(name, config, capsys):
    most = str(2**63 - 1)
    assert cli.main(["memory", str(config(**V3 | dict.fromkeys(WIDTHS, 2**31 - 1))), name, most]) == 0
    with pytest.raises(SystemExit, match="2"):
        cli.main(["memory", str(config(**V3)), name, "9" * 400])
    assert f"argument {name}: expected at most 9,223,372,036,854,775,807, found 999" in capsys.readouterr().err


def test_a_text_model_in_a_model_that_has_none(config):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="found none; deepseek_v3 has no text_config"):
        read_sizes(config(**V3 | {"text_config": {"kv_lora_rank": 512}}))


def test_a_config_that_transformers_refuses(config):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"found none; transformers refuses the config: .*'qk_rope_head_dim'"):
        read_sizes(config(**V3 | {"qk_rope_head_dim": None}))


def test_json_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="expected JSON in"):
        read_sizes(tmp_path)


def test_errors_are_one_line(config, tmp_path, capsys):
    assert cli.main(["memory", str(tmp_path / "nowhere")]) == 2
    assert cli.main(["memory", str(tmp_path)]) == 2
    assert f"expected a config.json in {tmp_path}, found none" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert cli.main(["memory", str(tmp_path)]) == 2
    assert "expected JSON" in capsys.readouterr().err.splitlines()[-1]


def test_the_table_says_what_its_numbers_count(config, capsys):
    assert cli.main(["memory", str(config(**V3)), "--context", "128k", "--batch", "16", "--memory", "80GiB"]) == 0
    out = capsys.readouterr().out
    assert "61 layers of N=128 L=512 P=128 R=64 V=128" in out
    assert "MHA's 57x: 128 heads of 128 for keys and for values, 65,536 against 1,152 bytes." in out
    assert "192 in all: 71x" in out
    assert "93.3 %" in out
    header, *lines = (line for line in out.splitlines() if line.startswith(("layout", "latent ")))
    assert header.endswith("sequences in 80 GiB")
    assert lines[0].split()[-1] == "9"


def test_the_published_figure_counts_as_the_note_says():
    """DeepSeek-V2: 60 layers of 512 + 64 at 6 bits, against DeepSeek 67B: 95 layers of 8 heads of 128 at 16."""
    assert round(100 * (1 - 60 * 576 * 6 / (95 * 2 * 8 * 128 * 16)), 1) == 93.3


def test_plot(config, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.svg"
    assert cli.main(["memory", str(config(**V3)), "--plot", str(file)]) == 0
    assert "<svg" in file.read_text()
    plot(MemoryPlan(ModelSizes("m", {HEADS: 2}), 700, 1, "bf16", 8, memory=2**20), tmp_path / "short.png")
    assert (tmp_path / "short.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_refused(config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["memory", str(config(**V3)), "--plot", "memory.png"]) == 2
    assert "pip install 'mla-compile[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["memory.xyz", "memory"])
def test_a_plot_without_a_format_is_refused_before_anything_is_printed(name, config, tmp_path, capsys):
    file = str(tmp_path / name)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["memory", str(config(**V3)), "--plot", file])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"expected a file that ends in .png, .svg, .pdf, found '{file}'" in printed.err


def test_numbers_with_units():
    assert [tokens(text) for text in ("4096", "128k", "0.5K", "1M")] == [4096, 131072, 512, 1048576]
    assert [in_bytes(text) for text in ("80GiB", "16gb", "1000")] == [80 * 2**30, 16 * 10**9, 1000]
    assert tokens(str(2**63 - 1)) == 2**63 - 1
    for wrong in ("", "0", "-1", "80 parsecs", "k"):
        with pytest.raises(ArgumentTypeError, match="expected a number of bytes"):
            in_bytes(wrong)


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999 bytes"), (1000, "0.977 KiB"), (656, "656 bytes"), (80 * 2**30, "80 GiB")]
)
def test_units(number, text):
    assert in_units(number) == text
