"""The verdict on any path, as of `gpujob verify`."""

import gzip
import io
import json
import os
import shutil
import struct
import zipfile
from pathlib import Path

import pytest

from launcher.api import PathVerdict, verify_path
from launcher.errors import LauncherError
from tests.exporter.files.checkpoints.checkpoint_trees import safetensors_bytes
from tests.launcher.verify.checkpoint_files import LAYOUTS, torch_bytes, write_checkpoint
from tests.launcher.verify.test_checkpoint_damage import set_times, write_two
from tests.support.launcher import gpujob


def verdict(path: Path, *, deep: bool = False) -> tuple[str, str, str | None]:
    found = verify_path(path, deep=deep)
    return found.kind, found.verdict, found.reason


def test_a_folder_of_checkpoints_has_the_verdict_of_the_newest(tmp_path: Path) -> None:
    write_two(tmp_path, "torch_distributed")
    shard = tmp_path / "step-200/__1_0.distcp"
    for path in (tmp_path, tmp_path / "step-200"):
        found = verify_path(path)
        assert (found.verdict, found.name, found.step, found.files) == ("whole", "step-200", 200, 4)
        assert found.resume == str(tmp_path / "step-200")
    shard.unlink()
    found = verify_path(tmp_path)
    assert (found.verdict, found.reason) == ("damaged", "step-200/__1_0.distcp is missing")
    assert (found.resume, found.resume_is_whole) == (str(tmp_path / "step-100"), True)
    assert verdict(tmp_path / "step-100") == ("checkpoint", "whole", None)


@pytest.mark.parametrize("name", ["eval_results.json", "pytorch_model.bin"])
def test_files_added_to_an_older_checkpoint_do_not_make_it_the_newest(name: str, tmp_path: Path) -> None:
    write_two(tmp_path, "deepspeed")
    added = tmp_path / "global_step100" / name
    added.write_bytes(torch_bytes({}) if name.endswith(".bin") else b"{}")
    found = verify_path(tmp_path)
    assert (found.name, found.resume) == ("global_step200", str(tmp_path / "global_step200"))
    assert verify_path(tmp_path / "global_step100").name == "global_step100"


@pytest.mark.parametrize("layout", ["zarr", "torch_distributed", "hugging_face"])
def test_a_checkpoint_is_known_by_its_content_whatever_its_name(layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, files := LAYOUTS[layout](5))
    place = (tmp_path / next(iter(files)).partition("/")[0]).rename(tmp_path / "weights")
    assert verdict(place) == ("checkpoint", "whole", None)
    (tmp_path / "link").symlink_to("weights")
    assert verdict(tmp_path / "link")[1] == "whole"


def test_a_folder_with_a_number_in_its_name_is_no_checkpoint(tmp_path: Path) -> None:
    write_two(tmp_path / "run_3", "hugging_face")
    found = verify_path(tmp_path / "run_3")
    assert (found.verdict, found.name, found.step) == ("whole", "checkpoint-200", 200)
    (tmp_path / "results_3").mkdir()
    (tmp_path / "results_3/part.jsonl").write_text('{"a": 1}\n')
    found = verify_path(tmp_path / "results_3")
    assert (found.kind, found.verdict, found.records) == ("folder", "whole", 1)


def test_a_run_directory_beside_checkpoints_is_none(tmp_path: Path) -> None:
    write_two(tmp_path, "hugging_face")
    write_checkpoint(tmp_path, {"run_5/manifest.json": b"{}", "checkpoint-100/manifest.json": b"{}"})
    found = verify_path(tmp_path)
    assert (found.verdict, found.name, found.resume) == ("whole", "checkpoint-200", str(tmp_path / "checkpoint-200"))
    shutil.rmtree(tmp_path / "checkpoint-200")
    assert verify_path(tmp_path).name == "checkpoint-100"
    write_checkpoint(tmp_path, {"4460_step2_train/manifest.json": b"{}"})
    assert verify_path(tmp_path).name == "checkpoint-100"
    shutil.rmtree(tmp_path / "checkpoint-100")
    with pytest.raises(LauncherError, match="has the run directories of jobs"):
        verify_path(tmp_path)


def test_a_folder_of_results_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "part.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "metadata.json").write_text('{"rows": 1}')
    assert verdict(tmp_path) == ("folder", "whole", None)
    for rank in range(3):
        write_checkpoint(tmp_path / "vectors", {f"rank{rank}.pt": torch_bytes({})})
    assert verdict(tmp_path / "vectors") == ("folder", "whole", None)


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "consolidated.01.pth"])
def test_a_folder_of_shards_is_a_checkpoint_whatever_its_name(name: str, tmp_path: Path) -> None:
    content = safetensors_bytes() if name.endswith(".safetensors") else torch_bytes({})
    names = [name.replace("2-of", "1-of").replace(".01", ".00"), name.replace("2-of", "3-of").replace(".01", ".03")]
    write_checkpoint(tmp_path / "llama", dict.fromkeys([*names, name.replace(".01", ".02")], content))
    (tmp_path / "llama" / name).unlink(missing_ok=True)
    assert verdict(tmp_path / "llama") == ("checkpoint", "damaged", f"llama/{name} is missing")


def test_a_damaged_copy_in_another_form_condemns_only_itself(tmp_path: Path) -> None:
    write_two(tmp_path, "deepspeed")
    write_checkpoint(tmp_path, {"global_step200_universal/zero/fp32.pt": torch_bytes({})[:300]})
    original, copy = tmp_path / "global_step200", tmp_path / "global_step200_universal"
    for path in (tmp_path, original):
        found = verify_path(path)
        assert (found.name, found.verdict, found.resume) == ("global_step200", "whole", str(original))
    found = verify_path(copy)
    assert (found.name, found.verdict, found.resume) == ("global_step200_universal", "damaged", str(original))
    shards = [f"global_step200_hf-0000{number}-of-00002.safetensors" for number in (1, 2)]
    write_checkpoint(tmp_path, dict.fromkeys(shards, safetensors_bytes()))
    found = verify_path(tmp_path / shards[0])
    assert (found.verdict, found.files) == ("cannot tell", 2)  # without the other copy; no index lists the shards
    for shard in shards:
        (tmp_path / shard).unlink()
    (original / "mp_rank_00_model_states.pt").write_bytes(b"")
    write_checkpoint(tmp_path, {"global_step200_universal/zero/fp32.pt": torch_bytes({})})
    assert verify_path(tmp_path).resume == str(tmp_path / "global_step100")  # the optimizer may not be in the copy


@pytest.mark.parametrize(
    ("names", "copy"),
    [
        (("epoch=3-step=100.ckpt", "epoch=3-step=200.ckpt"), "epoch=3-step=100.ckpt.consolidated"),
        (("iter_0000100", "iter_0000200"), "iter_100_hf"),
        (("global_step100", "global_step200"), "step100_hf"),
    ],
)
def test_a_late_copy_of_an_older_checkpoint_is_not_the_newest(
    names: tuple[str, str], copy: str, tmp_path: Path
) -> None:
    for name, step in zip((*names, copy), (100, 200, 300), strict=True):
        write_checkpoint(tmp_path, files := {f"{name}/model.safetensors": safetensors_bytes(step)})
        set_times(tmp_path, files, step)
    found = verify_path(tmp_path)
    assert (found.name, found.verdict, found.resume) == (names[1], "whole", str(tmp_path / names[1]))


@pytest.mark.parametrize(
    ("model", "other"),
    [
        ("model_{}_hf/model.safetensors", "optimizer_{}.pt"),
        ("model_step_{}_merged.safetensors", "optimizer_step_{}.pt"),
        ("step_{}_consolidated.safetensors", "step_{}_optimizer.pt"),
        ("step_{}_hf/model.safetensors", "step_{}_trainer_state.json"),
        ("step_{}_hf/model.safetensors", "step_{}.done"),
    ],
)
def test_what_is_named_like_a_copy_is_the_save_without_its_original(model: str, other: str, tmp_path: Path) -> None:
    rest = torch_bytes({}) if other.endswith(".pt") else b"{}"
    for step in (500, 1000):
        write_checkpoint(tmp_path, {model.format(step): safetensors_bytes(), other.format(step): rest})
    name, before = (model.format(step).partition("/")[0] for step in (1000, 500))
    found = verify_path(tmp_path)
    assert (found.name, found.verdict, found.resume) == (name, "whole", str(tmp_path / name))
    (tmp_path / model.format(1000)).write_bytes(safetensors_bytes()[:-8])
    found = verify_path(tmp_path)
    assert (found.name, found.verdict, found.resume) == (name, "damaged", str(tmp_path / before))


def test_a_directory_is_judged_without_others_of_the_same_number(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"llama-2-7b/model.safetensors": safetensors_bytes()})
    write_checkpoint(tmp_path, {"gemma-2-9b/model.safetensors": safetensors_bytes()[:-8]})
    found = verify_path(tmp_path / "llama-2-7b")
    assert (found.name, found.verdict, found.resume) == ("llama-2-7b", "whole", str(tmp_path / "llama-2-7b"))
    assert verify_path(tmp_path / "gemma-2-9b").verdict == "damaged"


def test_a_part_may_be_a_link(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "out", LAYOUTS["hugging_face"](5))
    shard = tmp_path / "out/checkpoint-5/model-00002-of-00003.safetensors"
    blob = shard.rename(tmp_path / "out/blob")
    shard.symlink_to("../blob")
    assert verdict(tmp_path / "out") == ("checkpoint", "whole", None)
    shard.unlink()
    shard.symlink_to(blob.rename(tmp_path / "blob"))
    reason = "checkpoint-5/model-00002-of-00003.safetensors: is a link to a place outside its folder"
    assert verdict(tmp_path / "out") == ("checkpoint", "cannot tell", reason)


def test_a_tied_tensor_is_in_the_index_and_the_metadata_of_its_shard(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": {"format": "pt", "lm_head": "embed"}, "embed": tensor}).encode()
    index = {"weight_map": dict.fromkeys(("embed", "lm_head"), "model-00001-of-00001.safetensors")}
    files = {
        "model-00001-of-00001.safetensors": len(header).to_bytes(8, "little") + header + b"\1\0\0\0",
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    write_checkpoint(tmp_path / "out", {f"checkpoint-5/{name}": content for name, content in files.items()})
    assert verdict(tmp_path / "out") == ("checkpoint", "whole", None)


@pytest.mark.parametrize("name", ["c", "c/0", "w"])
def test_zarr_2_may_have_arrays_of_any_name_and_other_files_beside(name: str, tmp_path: Path) -> None:
    second = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "<f4", "compressor": None, "filters": None}
    third = {
        "zarr_format": 3,
        "shape": [1],
        "data_type": "float32",
        "codecs": [{"name": "bytes"}],
        "chunk_grid": {"configuration": {"chunk_shape": [1]}},
        "chunk_key_encoding": {"name": "default"},
    }
    files = {
        "x/.zgroup": b'{"zarr_format": 2}',
        f"x/{name}/.zarray": json.dumps(second).encode(),
        f"x/{name}/0": b"1234",
        "y/w/zarr.json": json.dumps(third).encode(),
        "y/w/c/0": b"1234",
        "ranks/0": json.dumps({"rank": 0}).encode(),
    }
    write_checkpoint(tmp_path / "out", {f"checkpoint-5/{path}": content for path, content in files.items()})
    assert verdict(tmp_path / "out")[1] != "damaged"


@pytest.mark.parametrize(
    ("tracker", "right", "wrong", "reason"),
    [
        ("latest", "200", "300", "latest: names 300, which is not there"),
        ("latest", "100", "", "latest: is empty"),
        ("latest_checkpointed_iteration.txt", "7\n", "8\n", "names iter_0000008, which is not there"),
        ("latest_checkpointed_iteration.txt", "9", "10", "names iter_0000010, which is not there"),
        ("checkpoint", 'model_checkpoint_path: "c-5"', 'model_checkpoint_path: "c-6"', "names c-6.index, which is not"),
    ],
)
def test_a_tracker_that_names_a_lost_checkpoint_is_a_doubt(
    tracker: str, right: str, wrong: str, reason: str, tmp_path: Path
) -> None:
    for name in ("100/a.safetensors", "200/a.safetensors", "iter_0000007/a.safetensors", "global_step_9/a.safetensors"):
        write_checkpoint(tmp_path, {name: safetensors_bytes()})
    (tmp_path / "c-5.index").write_bytes(b"x")
    os.utime(tmp_path / "c-5.index", (0, 0))
    (tmp_path / tracker).write_text(right)
    assert verdict(tmp_path)[1] == "whole"
    (tmp_path / tracker).write_text(wrong)
    found = verify_path(tmp_path)
    assert (found.verdict, found.reason or "", found.resume_is_whole) == ("cannot tell", found.reason, True)
    assert reason in (found.reason or "")


@pytest.mark.parametrize("text", ["500", "model_500", '{"step":7}', "ready", "\u00e9" * 250, "step_" + "9" * 255, "\0"])
def test_a_tracker_may_name_a_checkpoint_in_its_own_way(text: str, tmp_path: Path) -> None:
    for name in ("model_500.pt", "run/iter_500/a.pt"):
        write_checkpoint(tmp_path, {name: torch_bytes({})})
    (tmp_path / "latest").write_text(text)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("500")
    assert verdict(tmp_path)[1] == verdict(tmp_path / "run")[1] == "whole"


def test_a_tracker_that_cannot_be_read_is_no_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "out", {"model_500.pt": torch_bytes({})})
    (tmp_path / "out/latest").write_text("model_400")

    read_text = Path.read_text

    def refuse(path: Path, *arguments: str) -> str:
        if path.name == "latest":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert verdict(tmp_path / "out")[1] == "whole"


def test_a_link_to_a_lost_checkpoint_is_a_doubt(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LAYOUTS["hugging_face"](5))
    (tmp_path / "latest").symlink_to("checkpoint-6")
    assert verdict(tmp_path)[1:] == ("cannot tell", "latest: leads to checkpoint-6, which is not there")


def test_output_files_are_judged_with_their_records(tmp_path: Path) -> None:
    output = tmp_path / "part [1].jsonl"
    output.write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    found = verify_path(output)
    assert (found.kind, found.verdict, found.files, found.records) == ("file", "whole", 1, 2)
    assert (verify_path(tmp_path).kind, verify_path(tmp_path).records) == ("folder", 3)
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n{"b')
    assert verify_path(tmp_path).verdict == "damaged"
    output.write_text("")
    assert verdict(output) == ("file", "damaged", "is empty")


LINES = b"12345678\n" * 200_000  # more than 1 MiB, and known as JSON Lines by their name alone


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.safetensors", safetensors_bytes(), ("whole", None)),
        ("a.safetensors", safetensors_bytes()[:-1], ("damaged", None)),
        ("a.csv", b"a,b\n1,2\n", ("whole", 1)),
        ("a.jsonl", LINES, ("whole", 200_000)),
        ("a.jsonl", LINES[:900_000] + b"{\n" + LINES[900_000:], ("whole", 200_001)),
    ],
)
def test_a_link_says_the_format_of_a_file_without_an_extension(
    name: str, content: bytes, expected: tuple[str, int | None], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "blobs", {"0123abcd": content, "own.jsonl": LINES})
    (tmp_path / name).symlink_to("blobs/0123abcd")
    (tmp_path / "link.csv").symlink_to("blobs/own.jsonl")
    found = verify_path(tmp_path / name)
    assert (found.verdict, found.records) == expected
    assert verdict(tmp_path / name, deep=True)[1] == ("damaged" if b"{\n" in content else found.verdict)
    assert verify_path(tmp_path / "link.csv").records == 200_000


def test_a_deep_look_reads_what_a_short_one_leaves_out(tmp_path: Path) -> None:
    model, lines, packed = tmp_path / "checkpoint_1.pt", tmp_path / "a.jsonl", tmp_path / "b.gz"
    text = tmp_path / "c.json"
    text.write_text(json.dumps(["word" * 5 + ('"' if n == 30_000 else "") for n in range(60_000)]).replace('\\"', '"'))
    content = torch_bytes({}, 5000)
    model.write_bytes(content.replace(b"\7" * 3000, b"\7" * 2999 + b"\6", 1))
    lines.write_text("".join(f'{{"id": {n}}}\n' if n != 50_000 else "{{\n" for n in range(100_000)))
    packed.write_bytes(gzip.compress(bytes(range(256)) * 20_000, 0)[:-2_000_000] + bytes(2_000_000))
    for path, reason in (
        (model, "Bad CRC-32 for file 'archive/data/0'"),
        (lines, "line 50001 is not JSON"),
        (text, "is not JSON at line 1, column "),
        (packed, "Error -3 while decompressing data: "),
    ):
        assert verdict(path)[1] != "damaged"
        _, found, why = verdict(path, deep=True)
        assert (found, (why or "")[: len(reason)]) == ("damaged", reason)


def test_a_deep_look_names_a_checkpoint_to_resume_from_that_it_has_read_too(tmp_path: Path) -> None:
    changed = torch_bytes({}, 5000).replace(b"\7" * 3000, b"\7" * 2999 + b"\6", 1)
    for step, content in enumerate((torch_bytes({}, 5000), changed, changed)):
        write_checkpoint(tmp_path, files := {f"checkpoint_{step}.pt": content})
        set_times(tmp_path, files, step)
    newest, whole = tmp_path / "checkpoint_2.pt", tmp_path / "checkpoint_0.pt"
    assert verify_path(tmp_path).resume == str(newest)
    for cut in (False, True):
        newest.write_bytes(changed[:-9] if cut else changed)
        found = verify_path(tmp_path, deep=True)
        assert (found.name, found.verdict) == ("checkpoint_2.pt", "damaged")
        assert (found.resume, found.resume_is_whole) == (str(whole), True)
    whole.unlink()
    assert verify_path(tmp_path, deep=True).resume is None


def zip_bytes(*, flags: int = 0, method: int = 0, crc: int | None = None) -> bytes:
    """An archive of one stored member, whose two headers say something else."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a", b"text")
    content = bytearray(out.getvalue())
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        begin = content.index(mark) + place
        content[begin : begin + 4] = struct.pack("<2H", flags, method)
        if crc is not None:
            content[begin + 8 : begin + 12] = crc.to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.zip", zip_bytes(flags=1), "its member 'a' is encrypted"),
        ("a.zip", zip_bytes(method=9), "its member 'a' cannot be unpacked: That compression method is not supported"),
        ("a.zip", zip_bytes(crc=0), "has no checksums"),
        ("a.jsonl", '{"a": 1}\n{"a": 2}\n'.encode("utf-16"), "is UTF-16 text"),
        ("a.jsonl", b"[" * 3000 + b"]" * 3000 + b"\n", "is nested too deeply to be checked"),
        ("a.jsonl", b"1" * 5000 + b"\n", None),
        ("a.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n', None),
    ],
    ids=["encrypted", "Deflate64", "no checksums", "UTF-16", "nested", "long number", "mark"],
)
def test_what_a_deep_look_cannot_read_is_no_damage(
    name: str, content: bytes, reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    _, found, why = verdict(tmp_path / name, deep=True)
    assert (found, (why or "")[: len(reason or "")]) == ("cannot tell" if reason else "whole", reason or "")


def test_a_deep_look_finds_damage_beside_what_it_cannot_read(tmp_path: Path) -> None:
    lines = tmp_path / "out/c.jsonl"
    write_checkpoint(tmp_path / "out", {"a.zip": zip_bytes(flags=1), "b.zip": zip_bytes(crc=7)})
    assert verdict(tmp_path / "out", deep=True)[1:] == ("damaged", "b.zip: Bad CRC-32 for file 'a'")
    lines.write_bytes(b"[" * 3000 + b"]" * 3000 + b"\n{\n")
    assert verdict(lines, deep=True)[1:] == ("damaged", "line 2 is not JSON")


def test_a_deep_look_reads_a_log_in_a_checkpoint_without_judging_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**LAYOUTS["hugging_face"](5), "checkpoint-5/log_history.jsonl": b'{"step": 1}\n{"st'})
    assert verdict(tmp_path, deep=True)[1:] == ("whole", None)


def test_the_bytes_read_are_reported(tmp_path: Path) -> None:
    path, read = tmp_path / "model.safetensors", list[int]()
    path.write_bytes(safetensors_bytes(1000))
    assert verify_path(path, deep=True, progress=read.append).verdict == "whole"
    assert sum(read) == path.stat().st_size


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="does not exist"):
        verify_path(tmp_path / "none")
    with pytest.raises(LauncherError, match="neither a file nor a folder"):
        verify_path("/dev/null")


def test_the_record_is_json_whatever_the_names(tmp_path: Path) -> None:
    path = tmp_path / "a\n\udcff.jsonl"
    path.write_text('{"a": 1}\n')
    found = verify_path(path)
    assert isinstance(found, PathVerdict)
    assert json.dumps(found.to_json()).encode().isascii()
    assert found.to_json()["parts"] == [r"a\n\udcff.jsonl"]


def test_the_command_prints_the_verdict_and_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    write_two(tmp_path, "one_file")
    (tmp_path / "checkpoint_200.pt").write_bytes(b"PK")
    done = gpujob("verify", "checkpoint_200.pt", "checkpoint_100.pt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (8, "")
    good = tmp_path.resolve() / "checkpoint_100.pt"
    assert done.stdout.splitlines() == [
        "checkpoint_200.pt: damaged: checkpoint_200.pt: is named .pt, but does not begin like one",
        "  checkpoint checkpoint_200.pt, 1 file, 2 bytes",
        f"  resume from {good}",
        "checkpoint_100.pt: whole",
        f"  checkpoint checkpoint_100.pt, 1 file, {len(torch_bytes({'step': 100}))} bytes",
        f"  resume from {good}",
    ]
    (tmp_path / "notes.dat").write_bytes(b"\1\2")
    done = gpujob("verify", "--json", "--deep", "notes.dat", cwd=tmp_path)
    (found,) = json.loads(done.stdout)["paths"]
    assert (done.returncode, found["verdict"], found["parts"]) == (9, "cannot tell", ["notes.dat"])
    assert found["reason"] == "has an unknown format"


def test_the_name_of_a_checkpoint_does_not_command_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b]0;x\x07"
    folder.mkdir()
    write_two(folder, "one_file")
    done = gpujob("verify", folder, cwd=tmp_path)
    assert "resume from" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_run_directory_and_a_job_are_sent_to_the_report(tmp_path: Path) -> None:
    run_dir = tmp_path / "local-1_job"
    run_dir.mkdir()
    (run_dir / "manifest.json").write_text("{}")
    with pytest.raises(
        LauncherError, match=f"run directory of a job; check its files with `gpujob report --verify {run_dir}`"
    ):
        verify_path(run_dir)
    with pytest.raises(LauncherError, match=f"{tmp_path} has the run directories of jobs; .* --verify {run_dir}`"):
        verify_path(tmp_path)
    with pytest.raises(LauncherError, match=r"local-1: does not exist; .*`gpujob report --verify` checks a job"):
        verify_path("local-1")
