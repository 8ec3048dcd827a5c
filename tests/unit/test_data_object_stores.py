"""Sets in S3 and in Google Cloud Storage, by servers on this machine that speak their protocols.

`.ci/install_torch` installs them: they need forty packages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest
from messages import mentions
from waits import PATIENCE

from ortflow.workflow.data import remote
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet

SECRET = "hush-hush-0123456789"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    remote.fetched.cache_clear()


def values(url: str) -> list[int]:
    import fsspec

    remote.fetched.cache_clear()
    fsspec.get_filesystem_class(url.partition("://")[0]).clear_instance_cache()
    samples = open_samples(DataSet(path=url))
    numbers: list[int] = samples.read("x", np.arange(len(samples))).tolist()
    return numbers


def refusal(url: str) -> str:
    with pytest.raises(UserError) as refused:
        values(url)
    return str(refused.value)


def rows(number: int) -> bytes:
    return b"x\n" + 2 * f"{number}\n".encode()


def read_as_one_set(scheme: str, put: Callable[[str, bytes], None]) -> None:
    for number in range(3):
        put(f"folder/part-{number}.csv", rows(number))
    assert values(f"{scheme}://sets/folder/part-1.csv") == [1, 1]
    assert values(f"{scheme}://sets/folder/part-*.csv") == [0, 0, 1, 1, 2, 2]
    assert values(f"{scheme}://sets/folder") == [0, 0, 1, 1, 2, 2]
    put("folder/part-1.csv", rows(9))
    assert values(f"{scheme}://sets/folder/part-1.csv") == [9, 9], "another version of the same size"
    for name in ("none.csv", "none-*.csv"):
        assert refusal(f"{scheme}://sets/{name}") == f"{scheme}://sets/{name}: there is no such file; correct the URL"


def test_s3(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    import requests

    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.aws
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        _, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
        client.create_bucket(Bucket="sets")
        assert mentions(refusal("s3://sets/one.csv"), "s3://sets/one.csv: cannot be fetched … credentials …; give cred")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        read_as_one_set("s3", lambda key, body: client.put_object(Bucket="sets", Key=key, Body=body))
        assert mentions(refusal("s3://none/one.csv"), "cannot be fetched … bucket does not exist")
        # From here on, moto knows no user with this key.
        done = requests.post(f"http://127.0.0.1:{port}/moto-api/reset-auth", data="0", timeout=PATIENCE)
        assert done.status_code == HTTPStatus.OK
        denied = refusal("s3://sets/folder/part-2.csv")
        assert mentions(denied, "s3://sets/folder/part-2.csv: access is denied (Forbidden); give credentials by")
        assert SECRET not in denied
    finally:
        server.stop()
    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert kept
    assert not any(SECRET.encode() in path.read_bytes() for path in kept)


def test_google_cloud_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")
    import requests

    monkeypatch.setenv("HOME", str(tmp_path))
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="sets")
    server.start()
    try:
        url = f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)

        def put(key: str, body: bytes) -> None:
            place = f"{url}/upload/storage/v1/b/sets/o"
            query = {"uploadType": "media", "name": key}
            done = requests.post(place, params=query, data=body, headers={"content-type": "text/csv"}, timeout=PATIENCE)
            assert done.status_code == HTTPStatus.OK

        capfd.readouterr()
        read_as_one_set("gs", put)
        assert "bucket type" not in capfd.readouterr().err, "what gcsfs logs is not printed"
    finally:
        server.stop()
