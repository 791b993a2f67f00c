"""The project's own files beside Inductor's artifacts are saved and loaded with these."""

import torch
from torch.compiler._cache import CacheArtifactManager

from mla_compile import cache_files


def test_what_a_process_read_or_wrote_is_saved_with_torchs_artifacts(tmp_path, monkeypatch):
    def moved_to(name):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        return cache_files.path_of("rates"), cache_files.path_of("report")

    for path, content in zip(moved_to("first"), ({"rate": 1.5}, ["text"]), strict=True):
        cache_files.write(path, content)
    saved = []
    for name in ("first", "second"):
        with CacheArtifactManager.with_fresh_cache():
            assert [cache_files.read(path, lambda c: c) for path in moved_to(name)] == [{"rate": 1.5}, ["text"]]
            artifacts, info = torch.compiler.save_cache_artifacts()
            saved.append(info.autotune_artifacts)
            moved_to("second")
            torch.compiler.load_cache_artifacts(artifacts)
    assert saved == [["mla_compile/rates.json", "mla_compile/report.json"]] * 2


def test_a_file_that_is_not_what_it_should_be_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    path = cache_files.path_of("rates")
    path.write_text('{"other": 1}')
    with CacheArtifactManager.with_fresh_cache():
        assert cache_files.read(path, lambda content: content["rate"]) is None
        assert torch.compiler.save_cache_artifacts() is None
