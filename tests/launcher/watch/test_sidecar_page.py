"""What `gpujob watch` gets from real sidecars with TLS and credentials."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.contract.status import NodeStatus
from launcher.rundir.statuses import fetch_status
from launcher.rundir.targets import SidecarRecord
from tests.exporter.sidecar.test_sidecar_process import SidecarProcess
from tests.support.certificates import Authority
from tests.support.exporter import make_manifest, write_manifest


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """A sidecar with TLS, whose certificate is of an unknown authority and of another name."""
    run_dir = tmp_path_factory.mktemp("job")
    Authority(run_dir).issue("node", "DNS:elsewhere")
    (run_dir / "web.yml").write_text("tls_server_config: {cert_file: node.pem, key_file: node.key}")
    write_manifest(make_manifest(run_dir, listen_address="127.0.0.1:0", web_config_file=str(run_dir / "web.yml")))
    run_files.write_job_state(str(run_dir), "running")
    process = SidecarProcess(run_dir)
    yield process
    process.close()


def record_of(sidecar: SidecarProcess) -> SidecarRecord:
    return SidecarRecord.from_json(sidecar.record)


def fetched(token: str | None, record: SidecarRecord) -> NodeStatus | str | None:
    return fetch_status(record.labels["node"], record, token, workers=1)


def test_the_owner_gets_the_status_of_a_page_with_tls(sidecar: SidecarProcess) -> None:
    status = fetched(run_files.read_token(sidecar.run_dir), record_of(sidecar))
    assert isinstance(status, NodeStatus)
    assert status.job.job_id == "4459"


def test_a_page_with_another_certificate_gets_no_token(sidecar: SidecarProcess) -> None:
    record = record_of(sidecar).replace(certificate="00" * 32)
    status = fetched(run_files.read_token(sidecar.run_dir), record)
    assert status == f"HTTPException: no answer from 127.0.0.1:{sidecar.port}"


def test_without_the_right_token_there_is_no_status(sidecar: SidecarProcess) -> None:
    assert fetched("0" * 64, record_of(sidecar)) == f"HTTPException: no answer from 127.0.0.1:{sidecar.port}"
    assert fetched(None, record_of(sidecar)) is None


def test_a_record_of_an_earlier_version_is_of_a_page_without_tls(tmp_path: Path) -> None:
    assert SidecarRecord.from_json({"attempt": 0, "address": "a:1", "labels": {}}).certificate is None
