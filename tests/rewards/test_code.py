"""``code``: programs against tests of every form, and what a program can't do.

1. The program is the last complete block of Python; tests have one of the documented forms.
2. What can't be tested is named; a program that does not end, or ends otherwise, passes nothing.
3. A program can't say that it passes: neither by leaving early nor by writing results.
4. No network, no process, no signal, no file outside its own folder; memory, files and time are bounded.
5. What a machine does not offer is said, and the tests run all the same.
"""

import asyncio
import json
import os
import pathlib
import time
import types

import pytest

from slime_cli.buffer.types import Sample
from slime_cli.buffer.values import RewardFailure
from slime_cli.rewards import sandbox
from slime_cli.rewards.graders import GraderError, code, grade, limits
from slime_cli.rewards.rewards import RewardPool

ADD = "def add(a, b):\n    return a + b"
ECHO = "print(int(input()) * 2)"


@pytest.fixture(autouse=True)
def patient():
    """A busy machine has the time that it needs."""
    limits.set_patience(100.0)
    yield
    limits.set_patience(10.0)


def fenced(program: str) -> str:
    return f"So:\n```python\n{program}\n```\n"


DOUBLES = {"inputs": ["1\n", "21\n"], "outputs": ["2", "42"]}
FORMS = [
    (ECHO, DOUBLES, {}),
    (ECHO, [{"input": "1", "output": "2\n"}, {"input": "21", "output": "42"}], {}),
    (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}, {}),
    (ADD, {"inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']}, {"fn_name": "add"}),
    (
        "class Solution:\n    def add(self, a: List[int]) -> Counter:\n        return Counter(a)",
        [{"input": [[1, 1]], "output": {"1": 2}}],
        {"fn_name": "add"},
    ),
    (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], {}),
    (ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4", {}),
    (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3", {"entry_point": "add"}),
    (ADD, "def test_add():\n    assert add(1, 2) == 3", {}),
    (
        ADD,
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(1, 2), 3)",
        {},
    ),
]


@pytest.mark.parametrize(("program", "tests", "metadata"), FORMS)
def test_every_form_of_tests(program, tests, metadata):
    wrong = program.replace("a + b", "a - b").replace("* 2", "* 3").replace("Counter(a)", "Counter()")
    assert wrong != program
    for given in ({"metadata": {"tests": tests} | metadata, "label": None}, {"metadata": metadata, "label": tests}):
        label = given["label"] if given["label"] is None or isinstance(tests, str) else json.dumps(tests)
        assert grade("code", fenced(program), label, given["metadata"]) == 1
        assert grade("code", fenced(wrong), label, given["metadata"]) == 0


def test_the_share_of_tests_that_pass():
    program = "def half(n):\n    return n / 2 if n % 2 == 0 else n // 2 + 1"
    tests = {"fn_name": "half", "inputs": [[0], [1], [2], [3]], "outputs": [0, 0.5, 1, 1.5]}
    assert grade("code_share", fenced(program), None, {"tests": tests}) == 0.5
    assert grade("code", fenced(program), None, {"tests": tests}) == 0
    assert grade("code_share", fenced("print(2 if input() == '1' else 0)"), None, {"tests": DOUBLES}) == 0.5


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```\na\n```\n```bash\nb\n```", "a\n"),
        ("```python\na\n```\n```python\nunfinished", "a\n"),
        ("```python\nunfinished", ""),
        ("<think>```python\na\n```</think>```python\nb\n```<|im_end|>", "b\n"),
        ("<think>```python\na\n```</think>no program", "no program"),
        ("print(1)", "print(1)"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("", ""),
    ],
)
def test_the_program_of_an_answer(response, program):
    assert code.program_of(response) == program


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("1 2\n3\n", "1  2 \n3\n\n", True),
        ("1 2", "1\n2", False),
        ("0.5", "0.50000001", True),
        ("0.5", "0.501", False),
        ("1000000", "1000001", False),
        ("3", "3.0", True),
        ("1e400", "1e400", True),
        ("YES", "yes", False),
        ("", "\n", True),
        ("1", "", False),
    ],
)
def test_outputs_compare_by_words(expected, found, same):
    assert code.same_output(expected, found) == same


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        (1, True, False),
        (0.1, 0.1 + 1e-9, True),
        (1.0, 1, True),
        (1, 1.0, True),
        ({"a": [0.5]}, {"a": [0.5]}, True),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
    ],
)
def test_values_compare_by_type_and_number(expected, found, same):
    assert code.same_value(expected, found) == same


@pytest.mark.parametrize(
    ("label", "metadata", "words"),
    [
        (None, {}, "no tests"),
        ("", {}, "no tests"),
        ("5", {}, "no tests"),
        ("[]", {}, "no tests"),
        (None, {"tests": {"inputs": ["1"], "outputs": []}}, "one length"),
        (None, {"tests": [{"input": "1"}]}, "'input' and 'output'"),
        (None, {"tests": ["assert 1"], "time_limit": "soon"}, "numbers"),
    ],
)
def test_what_cannot_be_tested_is_named(label, metadata, words):
    with pytest.raises(GraderError, match=words):
        grade("code", fenced(ADD), label, metadata)


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a +",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "def add(a, b):\n    import os\n    os.kill(os.getpid(), 9)",
        'import os; os.write(4, b\'{"test": 0, "value": 3}\\n\'); os._exit(0)',
        'import os; os.write(4, b\'{"secret": "", "test": 0, "value": 3}\\nnonsense\\n[]\\n\'); os._exit(0)',
        'print(\'{"test": 0, "value": 3}\')',
        "def add(a, b):\n    return object()",
        "def add(a, b):\n    return [a] * 10**10",
        "def add(a, b):\n    return add(a, b)",
    ],
)
@pytest.mark.parametrize("tests", [["assert add(1, 2) == 3"], [{"input": [1, 2], "output": 3}]], ids=["assert", "call"])
def test_a_program_cannot_say_that_it_passes(program, tests):
    assert grade("code", fenced(program), None, {"tests": tests, "fn_name": "add"}) == 0


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(600)"])
def test_a_program_that_does_not_end_is_wrong_in_its_own_time(program):
    begin = time.process_time()
    assert grade("code", fenced(program), None, {"tests": DOUBLES, "time_limit": 0.3}) == 0
    assert time.process_time() - begin < 2


def test_the_tests_of_an_answer_together_have_half_of_the_timeout(monkeypatch):
    limits.set_patience(1000.0)
    monkeypatch.setattr(code, "SHARE", 0.0004)
    tests = {"inputs": ["1"] * 50, "outputs": ["2"] * 50}
    slow = fenced("import time; time.sleep(0.15); " + ECHO)
    assert 0 < grade("code_share", slow, None, {"tests": tests}) < 0.1


def test_a_machine_that_is_too_busy_judges_nobody():
    limits.set_patience(1e-6)
    with pytest.raises(GraderError, match="too busy .* raise --rm-timeout"):
        grade("code", fenced(ECHO), None, {"tests": DOUBLES})


def ran(program: str, **how: object) -> sandbox.Ran:
    return sandbox.run(program, seconds=20.0, until=time.monotonic() + 100, **how)  # pyright: ignore


@pytest.fixture(scope="module")
def isolated():
    missing = sandbox.missing_here()
    return lambda what: pytest.skip(str(missing)) if any(what in one for one in missing) else None


@pytest.mark.parametrize(
    ("layer", "program"),
    [
        ("seccomp", "import socket; socket.create_connection(('127.0.0.1', PORT), 2)"),
        ("seccomp", "import socket; socket.socket(socket.AF_UNIX)"),
        ("seccomp", "import os; os.fork()"),
        ("seccomp", "import subprocess; subprocess.run(['true'])"),
        ("seccomp", "import os; os.execv('/bin/true', ['true'])"),
        ("seccomp", "import os; os.kill(OWNER, 0)"),
        ("seccomp", "import os; os.unshare(os.CLONE_NEWUSER)"),
        ("seccomp", "import resource; resource.prlimit(OWNER, resource.RLIMIT_NOFILE)"),
        ("Landlock", "open('SECRET').read()"),
        ("Landlock", "open('SECRET', 'w')"),
        ("Landlock", "import os; os.unlink('SECRET')"),
        ("Landlock", "import os; os.listdir('FOLDER')"),
        ("Landlock", "open('FOLDER/new', 'w')"),
        ("Landlock", "open('/proc/OWNER/environ').read()"),
        ("", "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"),
        ("", "open('x', 'wb').write(bytes(32 << 20))"),
        ("", "bytearray(2 << 30)"),
        ("namespaces", "for i in range(10): open(str(i), 'wb').write(bytes(12 << 20))"),
    ],
)
def test_what_a_program_cannot_do(isolated, tmp_path, layer, program):
    isolated(layer or "nothing")
    secret = tmp_path / "secret"
    secret.write_text("answer")
    words = {"PORT": "9", "OWNER": str(os.getpid()), "SECRET": str(secret), "FOLDER": str(tmp_path)}
    for word, value in words.items():
        program = program.replace(word, value)
    done = ran(f"try:\n    exec({program!r})\nexcept (OSError, MemoryError, ValueError) as e: print('no', type(e))")
    assert done.output.startswith("no <class"), done
    assert secret.read_text() == "answer" and os.listdir(tmp_path) == ["secret"]


def test_a_program_has_a_folder_threads_numbers_and_its_input():
    program = """
import asyncio, os, tempfile, threading, random, numpy
open("mine", "w").write("x")
assert os.listdir(".") == ["mine"] and open("/dev/null").read() == ""
seen = []
thread = threading.Thread(target=seen.append, args=(1,))
thread.start(); thread.join()
async def one(): return input()
print(asyncio.run(one()), seen, numpy.arange(3).sum(), len(os.urandom(4)), dict(os.environ).get("SECRET"))
"""
    os.environ["SECRET"] = "x"
    try:
        done = ran(program, stdin="given")
    finally:
        del os.environ["SECRET"]
    assert done.output == "given [1] 3 4 None\n", done.error
    assert not list(pathlib.Path("/tmp").glob("slime-code-*/mine"))


def test_a_user_of_its_own(isolated):
    isolated("namespaces")
    assert ran("import os; print(os.getuid())").output == "65534\n"


def test_what_a_machine_lacks_is_said_once_and_the_program_runs(monkeypatch, caplog, tmp_path):
    child = tmp_path / "child.py"
    source = sandbox.CHILD.read_text()
    for layer in ("namespaces()", "files(readable: list[str], scratch: str)", "system_calls()"):
        head = f"def {layer} -> None:\n"
        assert head in source
        source = source.replace(head, f"{head}    raise OSError(1, 'not here')\n")
    child.write_text(source)
    monkeypatch.setattr(sandbox, "CHILD", child)
    monkeypatch.setattr(code, "_said", set())
    assert len(sandbox.missing_here()) == 3
    for _ in range(2):
        assert grade("code", fenced(ECHO), None, {"tests": DOUBLES}) == 1
    (said,) = [record.message for record in caplog.records]
    assert "less isolated" in said and said.count("not here") == 3


def test_no_process_and_no_folder_is_left():
    before = set(pathlib.Path("/tmp").glob("slime-code-*"))
    ran("import os; open('left', 'w').write('x')")
    assert not {path for path in pathlib.Path("/tmp").glob("slime-code-*") if (path / "left").exists()} - before


async def test_programs_in_the_pool_have_the_workers_time():
    """What --rm-timeout is reaches the grader; a program that takes all of its time costs no worker."""
    names = ("rm_url", "custom_rm_path", "group_rm", "reward_key", "eval_reward_key")
    args = types.SimpleNamespace(rm_type="code", **dict.fromkeys(names))
    metadata = {"tests": DOUBLES, "time_limit": 0.2}
    programs = [ECHO, "while True: pass", "print(2)", ECHO]
    samples = [Sample(i, 0, response=fenced(one), metadata=metadata) for i, one in enumerate(programs)]
    async with RewardPool(1, 100.0) as pool:
        found = await asyncio.gather(*(pool.score(sample, args) for sample in samples))
        assert pool.workers.replaced == 0
    assert found == [1.0, 0.0, 0.0, 1.0]
    async with RewardPool(1, 0.02) as pool:
        failure = await pool.score(samples[0], args)
    assert isinstance(failure, RewardFailure) and ("too busy" in failure.detail or failure.kind == "timeout")
