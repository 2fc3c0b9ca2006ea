"""The wire format between launcher and exporter."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from exporter.contract.errors import ManifestError
from exporter.contract.manifest import (
    SCHEMA_VERSION,
    LogPattern,
    Manifest,
    PathGroup,
    Task,
    parse_manifest,
    read_manifest,
    render_manifest,
)
from tests.conftest import GOLDEN
from tests.support.exporter import make_manifest, make_task, write_manifest
from tests.support.strategies import MANIFESTS

RUN_DIR = Path("/runs/1")


def body_with(**changes: Any) -> str:
    """The text of a small manifest with these changes. None removes a key."""
    body = {**render_manifest(make_manifest(RUN_DIR)), **changes}
    return json.dumps({key: value for key, value in body.items() if value is not None})


@given(MANIFESTS)
def test_a_written_manifest_is_read_back_unchanged(manifest: Manifest) -> None:
    text = json.dumps(render_manifest(manifest))
    assert parse_manifest(text, manifest.run_dir) == manifest


def test_a_manifest_of_the_first_schema_can_be_read() -> None:
    """The file is never rewritten, so jobs of earlier versions can still be watched."""
    assert read_manifest(GOLDEN / "manifest" / "v1.json") == Manifest(
        job_name='embed "v2"',
        user="ada",
        cluster="c1",
        partition="gpu",
        nodes=2,
        tasks=(
            Task(
                "prefill_w0",
                "prefill",
                index=0,
                rank=0,
                local_rank=0,
                node_index=0,
                gpus=(0, 1, 2, 3),
                logs=("{node}_prefill_w0{run}.out", "{node}_prefill_w0{run}.err"),
            ),
            Task(
                "decode_w0",
                "decode",
                index=0,
                rank=1,
                local_rank=0,
                node_index=1,
                gpus=(0, 1, 2, 3, 4, 5, 6, 7),
                logs=("{node}_decode_w0{run}.out", "{node}_decode_w0{run}.err"),
            ),
            Task("decode_w0", "decode", index=0, rank=2, local_rank=1, node_index=0),
        ),
        groups=(PathGroup("output", "/scratch/ada/out", "output_*.jsonl"), PathGroup("checkpoint", "ckpt", None)),
        logs=PathGroup("log", ".", "worker_*.log"),
        progress=(LogPattern("items", r"step (\d+)/(\d+)"),),
        errors=(LogPattern("oom", "(out of memory|OOM)", "critical"),),
        total_items=100_000,
        time_limit_s=14_400.0,
        check_interval_s=2.0,
        launch_timeout_s=30.0,
        stall_timeout_s=600.0,
        linger_s=15.0,
        listen_address=":9410",
        run_dir=GOLDEN / "manifest",
    )


def test_the_schema_version_comes_first_and_the_run_directory_is_not_written() -> None:
    body = render_manifest(make_manifest(RUN_DIR))
    assert next(iter(body.items())) == ("schema_version", SCHEMA_VERSION)
    assert "run_dir" not in body


def test_gpu_metrics_are_off_unless_the_manifest_enables_them() -> None:
    assert parse_manifest(body_with(gpu_metrics=True), RUN_DIR).gpu_metrics is True
    body = json.loads(body_with())
    del body["gpu_metrics"]
    assert parse_manifest(json.dumps(body), RUN_DIR).gpu_metrics is False
    with pytest.raises(ManifestError, match="gpu_metrics is 1, not of type"):
        parse_manifest(body_with(gpu_metrics=1), RUN_DIR)


def test_unknown_keys_are_ignored() -> None:
    body = json.loads(body_with())
    body["from_the_future"] = {"a": 1}
    body["run_dir"] = "/elsewhere"
    for entry in (body["tasks"][0], body["groups"][0]):
        entry["from_the_future"] = [1]
    assert parse_manifest(json.dumps(body), RUN_DIR) == make_manifest(RUN_DIR)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_schema_version_is_refused_with_a_suggestion(version: object) -> None:
    with pytest.raises(ManifestError, match="this exporter reads 1; use the exporter of the installation that") as info:
        parse_manifest(body_with(schema_version=version), RUN_DIR)
    assert str(info.value).startswith(f"schema_version is {version!r}, ")


@pytest.mark.parametrize("text", ["[]", "1", '"a"', "null", "{}"])
def test_json_without_a_schema_version_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match=r"^schema_version is None, "):
        parse_manifest(text, RUN_DIR)


@pytest.mark.parametrize("text", ["", "{", "\x00", "schema_version: 1", "[" * 9999])
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match=r"^not JSON: "):
        parse_manifest(text, RUN_DIR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (body_with(job_name=None), "job_name"),
        (body_with(tasks=None), "tasks"),
        (body_with(groups=None), "groups"),
        (body_with(tasks=[{}]), "gpus"),
        (body_with(tasks=["w0"]), ""),
        (body_with(tasks=7), ""),
        (body_with(tasks=[{"worker": "w0", "gpus": [], "logs": []}]), "role"),
        (body_with(groups=[{"name": "output"}]), "directory"),
        (body_with(logs=["."]), ""),
        (body_with(errors=[{"name": "oom"}]), "pattern"),
    ],
)
def test_an_incomplete_manifest_is_refused_with_the_missing_key(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=r"^incomplete or malformed: ") as info:
        parse_manifest(text, RUN_DIR)
    assert message in str(info.value)


@pytest.mark.parametrize(
    "changes",
    [
        *({"check_interval_s": "5"}, {"nodes": "2"}, {"job_name": 7}, {"stall_timeout_s": [1]}),
        *({"total_items": "many"}, {"total_epochs": "90"}, {"total_steps": 1.5}),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_value_of_the_wrong_type_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match=next(iter(changes))):
        parse_manifest(body_with(**changes), RUN_DIR)


def test_a_manifest_is_found_by_its_file_and_by_its_directory(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path.resolve())
    write_manifest(manifest)
    assert read_manifest(tmp_path) == read_manifest(tmp_path / "manifest.json") == manifest


def test_totals_of_epochs_and_steps_are_in_the_file(tmp_path: Path) -> None:
    write_manifest(make_manifest(tmp_path, total_epochs=90, total_steps=4500))
    manifest = read_manifest(tmp_path)
    assert (manifest.total_items, manifest.total_epochs, manifest.total_steps) == (None, 90, 4500)


def test_the_run_directory_is_absolute_and_not_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "link").symlink_to(run_dir)
    write_manifest(make_manifest(run_dir))
    monkeypatch.chdir(tmp_path)
    assert read_manifest("link").run_dir == run_dir.resolve()


def test_an_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as absent:
        read_manifest(tmp_path)
    assert str(absent.value) == f"{tmp_path / 'manifest.json'}: No such file or directory"
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(ManifestError) as broken:
        read_manifest(tmp_path)
    assert str(broken.value).startswith(f"{tmp_path / 'manifest.json'}: not JSON: ")


def test_names_that_are_not_utf8_survive_the_file(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path.resolve(), groups=(PathGroup("output", "o\udcffut", "*\udc80"),))
    write_manifest(manifest)
    assert read_manifest(tmp_path) == manifest


def test_a_node_has_its_own_tasks() -> None:
    tasks = (make_task(0, node_index=0), make_task(1, node_index=1), make_task(2, node_index=0))
    manifest = make_manifest(RUN_DIR, *tasks)
    assert [task.rank for task in manifest.tasks_of(0)] == [0, 2]
    assert [task.rank for task in manifest.tasks_of(1)] == [1]
    assert manifest.tasks_of(7) == ()


def test_a_relative_directory_is_below_the_run_directory() -> None:
    manifest = make_manifest(RUN_DIR)
    assert manifest.directory(PathGroup("a", "out", None)) == RUN_DIR / "out"
    assert manifest.directory(PathGroup("a", "/data", None)) == Path("/data")
