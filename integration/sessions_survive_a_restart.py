"""Sticky sessions over a restart of the process, and their copy in S3 when it ends."""

import signal
from pathlib import Path

from integration.client import call
from integration.conftest import StartServer
from tests.support.s3_server import BUCKET, s3_server

HEADER = "x-amzn-sagemaker-session-id"
NEW = {"requestType": "NEW_SESSION"}
ARGUMENTS = ("--demo", "--port", "0", "--engine", "scripted")


def test_sessions_survive_a_restart_and_reach_s3(
    server_process: StartServer, tmp_path: Path
) -> None:
    """The next process knows the session; SIGTERM left a copy below sessions_s3url."""
    with s3_server() as store:
        environ = {
            **store.environ,
            "AWS_ENDPOINT_URL": "http://{}:{}".format(*store.backend),  # the proxy only reads
            "AWS_EC2_METADATA_DISABLED": "true",
            "OPTION_SESSIONS_PATH": str(tmp_path / "sessions"),
            "OPTION_SESSIONS_S3URL": f"s3://{BUCKET}/kept",
        }
        server = server_process(*ARGUMENTS, environ=environ)
        url = server.url_when_ready(30)
        name = call(url, "/invocations", NEW).headers[HEADER].partition(";")[0]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        listed = store.client.list_objects_v2(Bucket=BUCKET, Prefix="kept/")["Contents"]
        assert [entry["Key"] for entry in listed] == [f"kept/{name}/.session.json"]

        server = server_process(*ARGUMENTS, environ=environ)
        url = server.url_when_ready(30)
        answer = call(url, "/invocations", {"inputs": "x"}, headers={HEADER: name})
        assert answer.status == 200


def test_sessions_path_that_cannot_be_made_ends_the_start(
    server_process: StartServer, tmp_path: Path
) -> None:
    """The last line names the option and where it was set."""
    (tmp_path / "file").write_text("")
    environ = {"OPTION_SESSIONS_PATH": str(tmp_path / "file" / "below")}
    server = server_process(*ARGUMENTS, environ=environ)
    assert server.wait_exit() == 1
    assert "sessions_path (OPTION_SESSIONS_PATH)" in server.stderr.splitlines()[-1]
