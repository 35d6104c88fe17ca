"""What fails beside other tests is tried once more, alone, and named."""

from pathlib import Path

import pytest

from scripts.run_together import CONTRACT, MAX_RETRIED, run_together

ROOT = Path(__file__).parents[3]
FILES = ("test_one.py", "test_two.py")
PASSES = "def test_passes(): pass\n"
FAILS_ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("way", ["a b::c/d"])
def test_fails_once(way):
    path = Path(__file__).with_name("seen")
    was_there = path.exists()
    path.touch()
    assert was_there
"""
FAILS = "def test_fails(): assert 0\n"
MANY = "".join(f"def test_{number}(): assert 0\n" for number in range(MAX_RETRIED + 1))
CANNOT_START = """
import pytest

@pytest.fixture(params=range(20))
def no(request):
    1 / 0

def test_error(no): pass
"""
NO_PYTHON = "def ("
TOO_MANY = """
def pytest_sessionfinish(session):
    session.exitstatus = 1
"""
STARTS_TOO_MANY = """
from tests.support.engine_starts import BUDGETS, STARTS

STARTS.seconds["contract"] = [1.0] * (BUDGETS["contract"] + 1)
"""
ENDS = "import os\ndef test_end(): os._exit(3)\n"
NAMED = "failed beside others, passed alone: test_one.py::test_fails_once[a b::c/d]"


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that happen to be installed take seconds of each run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize(
    ("one", "two", "code", "said"),
    [
        pytest.param(PASSES, PASSES, 0, "2 passed", id="all pass"),
        pytest.param(FAILS_ONCE, PASSES, 0, NAMED, id="once"),
        pytest.param(FAILS_ONCE, FAILS, 1, NAMED, id="once beside always"),
        pytest.param(PASSES, FAILS, 1, "failed alone: test_two.py::test_fails", id="always"),
        pytest.param(PASSES, CANNOT_START, 1, "===== 20 failed beside others", id="errors"),
        pytest.param(PASSES, MANY, 1, f"{MAX_RETRIED + 1} failures: too", id="many of one file"),
        pytest.param(PASSES, NO_PYTHON, 2, "failed alone: test_two.py", id="cannot be collected"),
        pytest.param(PASSES, ENDS, 3, "crashed while running 'test_two.py::test_end'", id="ends"),
        pytest.param("", "", 5, "no tests ran", id="nothing to run"),
    ],
)
def test_retry_is_limited_and_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], one: str, two: str, code: int, said: str
) -> None:
    """Only what passes then is forgiven, and never without a message."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(one, encoding="utf-8")
    (tmp_path / "test_two.py").write_text(two, encoding="utf-8")

    assert run_together(FILES, ("-q",), tmp_path, tmp_path) == code
    out = capfd.readouterr().out
    assert said in out
    assert ("passed alone" in out) == (one == FAILS_ONCE)


def test_many_files_without_a_server_are_not_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That is no matter of the machine's other work."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    files = [f"test_{number}.py" for number in range(MAX_RETRIED + 1)]
    for file in files:
        (tmp_path / file).write_text(CANNOT_START, encoding="utf-8")
    assert run_together(files, (), tmp_path, tmp_path) == 1
    assert f"{MAX_RETRIED + 1} failures: too many" in capfd.readouterr().out


def test_run_that_fails_without_a_failed_test_is_a_failure(tmp_path: Path) -> None:
    """Too many engines, say: nothing is there to be tried again."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(PASSES, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(TOO_MANY, encoding="utf-8")
    assert run_together(FILES[:1], (), tmp_path, tmp_path) == 1


def test_too_many_engines_are_a_failure_beside_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A test that passes alone does not hide them."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(FAILS_ONCE, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(STARTS_TOO_MANY, encoding="utf-8")
    assert run_together(FILES[:1], (), tmp_path, tmp_path) == 1
    out = capfd.readouterr().out
    assert NAMED in out
    assert "too many engines were started" in out


def test_tests_of_a_file_stay_together(tmp_path: Path) -> None:
    """They share their servers."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    shared = "import os, pathlib\nimport pytest\n@pytest.mark.parametrize('n', range(9))\n"
    body = "def test_it(n): pathlib.Path(f'{os.getpid()}-{n}').touch()\n"
    (tmp_path / "test_one.py").write_text(shared + body, encoding="utf-8")
    assert run_together(FILES[:1], (), tmp_path, tmp_path) == 0
    assert len({path.name.split("-")[0] for path in tmp_path.glob("*-?")}) == 1


def test_files_are_begun_in_the_order_of_collection(tmp_path: Path) -> None:
    """Not those with the most tests first: conftest.py knows which take longest."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    body = "def test_{}(): open('seen', 'a').write(__file__[-4])\n"
    for name, count in (("a", 1), ("b", 9)):
        text = "".join(body.format(number) for number in range(count))
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    assert run_together(("test_a.py", "test_b.py"), ("-n", "1"), tmp_path, tmp_path) == 0
    assert (tmp_path / "seen").read_text(encoding="utf-8") == "a" + "b" * 9


def test_files_of_the_contract_share_a_worker(tmp_path: Path) -> None:
    """They share an engine there; files of other folders go to the other workers first."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    noted = f"import os\ndef test_it():\n    with open({str(tmp_path / 'noted')!r}, 'a') as file:\n"
    noted += "        print(__name__, os.environ['PYTEST_XDIST_WORKER'], file=file)\n"
    for folder, names in ((CONTRACT, "ab"), ("integration", "cdefgh")):
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / f"test_{name}.py").write_text(noted, encoding="utf-8")

    assert run_together(("integration", CONTRACT), ("-q",), tmp_path, tmp_path) == 0
    lines = (line.split() for line in (tmp_path / "noted").read_text().splitlines())
    workers = {name[-1]: worker for name, worker in lines}
    assert len(workers) == 8
    assert workers["a"] == workers["b"]
    others = {"gw0", "gw1", "gw2"} - {workers["a"]}  # which worker is ready first is chance
    assert {workers[name] for name in "cdef"} == others
