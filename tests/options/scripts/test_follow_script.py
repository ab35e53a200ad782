"""Launch scripts are read without running anything: what they start, as bash would have it, and what is not known.

The scripts here are made of the constructs that slime's are made of. Where bash is on the machine, what is followed is
compared with what bash itself hands to the program.
"""

import pathlib
import shutil
import subprocess

import pytest

from slime_cli.errors import UsageError
from slime_cli.options.scripts.follow import Followed, follow, told

START = 'python3 train.py "${ARGS[@]}"'
MODEL = """
NLAYERS=6
FIRST=1
arr=()
for ((i=0; i<NLAYERS; i++)); do
  if (( i < FIRST )); then
    arr+=(0)
  else
    arr+=(1)
  fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
MODEL_ARGS=(
   --num-layers ${NLAYERS}   # as many
   --rotary-base "${ROTARY:-1000000}"
   --moe-layer-freq $FREQ
)
"""


def read(tmp_path: pathlib.Path, text: str, **environment: str) -> Followed:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return follow(path, environment)


def words(tmp_path: pathlib.Path, text: str, **environment: str) -> list[str]:
    found = read(tmp_path, text, **environment)
    assert not unknown(found), unknown(found)
    return [word.text for word in found.start.words]


def unknown(found: Followed) -> list[str]:
    return [note.partition(":")[2] for note in told(found.start.notes.union(*(w.notes for w in found.start.words)))]


KNOWN = {
    "arrays": "ARGS=(--a 1\n  # --no\n  --b 'x y'  \"z $((1 + 2))\"\n)\nARGS+=(--c)",
    "variables": 'BASE=/m; NAME=${BASE}/x; ARGS=("--a=$NAME" --b ${NAME}y --c "$BASE")',
    "an unquoted value splits": 'MORE="--a 1  --b"; ARGS=($MORE --c "$MORE")',
    "defaults": 'X=; ARGS=("${X:-a}" "${X-b}" "${Y:-c}" "${Y-d e}" ${Z:-f g} "${X:+no}" "${NAME:=h}")',
    "lengths and items": 'A=(x y z); ARGS=(${#A[@]} "${A[1]}" ${A[$((0+2))]} "${A[-1]}" ${A[@]} "${A[*]}")',
    "trimmed": "P=/a/b.tar.gz; ARGS=(${P##*/} ${P%.*} ${P%%.*} ${P#*/})",
    "a count": "i=1; ((i++)); ((i+=3)); ARGS=($i $((i*2)) $((7/2)) $((7%3)) $((i>4 && 1)))",
    "if": 'A=2; if [ "$A" -gt 1 ]; then ARGS=(--x); elif [ 1 = 1 ]; then ARGS=(--y); else ARGS=(--z); fi',
    "else": 'if [[ "$A" == b* || -n "$C" ]]; then ARGS=(--x); else ARGS=(--z "${A:-}"); fi',
    "a variable of nobody": 'ARGS=(a); if [ "$NOBODY" = 1 ]; then ARGS+=(b); fi; [ -z "$NO" ] && ARGS+=(c)',
    "and, or": "ARGS=(a); [ 1 = 2 ] && ARGS+=(b); [ 1 = 2 ] || ARGS+=(c); true && ARGS+=(d); false || ARGS+=(e)",
    "not": "ARGS=(a); if ! [ 1 = 2 ]; then ARGS+=(b); fi; if [ ! -d /nowhere ]; then ARGS+=(c); fi",
    "for": "ARGS=(); for x in 1 2 'a b'; do ARGS+=(--x \"$x\"); done",
    "case": 'M=fast2; case "$M" in slow|slower) ARGS=(s);; fast*) ARGS=(f);; *) ARGS=(o);; esac',
    "functions": "add() { ARGS+=(--f); }\nfunction more { ARGS+=(--g); }\nARGS=(); add; more",
    "what a pipe and a subshell set is lost": "ARGS=(a); (ARGS+=(b)); { ARGS+=(c); }; true | ARGS+=(d)",
    "documents": "cat > /dev/null <<'EOF'\npython3 train.py ' \" $(\nEOF\nARGS=(a)",
    "quotes": 'ARGS=(\'{"a": 1}\' "{\\"b\\": \\"$((1))\\"}" a\\ b $\'c\\td\' "")',
    "continued lines": "ARGS=(a \\\n  b)\nX=1 \\\n  true",
    "printf": 'printf -v X "%s-%d" a 3; printf -v Y "%s," 1 2 3; ARGS=($X $Y)',
    "a model's file": MODEL + 'ARGS=("${MODEL_ARGS[@]}")',
    "exports": 'export A=1 B="x y"; ARGS=("$A" "$B")',
    "redirections": "ARGS=(a); ls >/dev/null 2>&1 < /dev/null; echo x &> /dev/null",
    "empty arrays": 'NO=(); ARGS=("${NO[@]}" "" a "${NO[@]}"); ARGS+=("${NO[@]}")',
    "appended": 'A=x; A+=y; ARGS=("$A")',
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_is_what_bash_hands_on(tmp_path: pathlib.Path, name: str):
    text = f"{KNOWN[name]}\n{START} 2>&1 | tee log\n"
    found = words(tmp_path, text)
    program = tmp_path / "python3"
    program.write_text('#!/bin/sh\nshift\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["bash", tmp_path / "run.sh"], cwd=tmp_path, env=path, capture_output=True, text=True)
    assert found == ran.stdout.split("\0")[:-1], ran.stderr


def test_the_environment_is_the_shells(tmp_path: pathlib.Path):
    assert words(tmp_path, f'ARGS=($A "${{B:-c}}")\n{START}', A="x y") == ["x", "y", "c"]


@pytest.mark.parametrize(
    "line",
    [
        "python3 train.py --a 1",
        "PYTHONPATH=/x nohup python3 -u /root/slime/train.py --a 1 &",
        "ray job submit --address='http://h:1' \\\n  --runtime-env-json=\"${JSON}\" \\\n  -- python3 train.py --a 1",
        "cd /root && python train.py --a 1 > log 2>&1",
    ],
)
def test_where_slime_is_started(tmp_path: pathlib.Path, line: str):
    found = read(tmp_path, f'JSON="{{\n \\"env\\": {{}}\n}}"\n{line}\n')
    assert [word.text for word in found.start.words] == ["--a", "1"] and found.start.program == "train.py"
    assert found.start.line == 4


def test_files_that_it_reads(tmp_path: pathlib.Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text(MODEL)
    head = 'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    found = read(tmp_path, f'{head}source "${{HERE}}/models/m.sh"\npython3 train_async.py ${{MODEL_ARGS[@]}}\n')
    assert [w.text for w in found.start.words][-1] == "[0,1,1,1,1,1]" and found.start.program == "train_async.py"
    assert [pathlib.Path(path).name for path in found.read] == ["run.sh", "m.sh"]
    lacking = read(tmp_path, "source models/none.sh\npython3 train.py ${MODEL_ARGS[@]} --a\n")
    (said,) = unknown(lacking)
    assert said.startswith("2: MODEL_ARGS is set nowhere;") and said.endswith("run.sh:1: models/none.sh is not here")


@pytest.mark.parametrize(
    ("text", "kept", "said"),
    [
        ("ARGS=(--save /m/$(date +%F))", ["--save", "/m/$(date +%F)"], "1: $(date +%F) is not run"),
        ("D=$(date)\nX=1\nARGS=(--save ${D}x)", ["--save", "$(date)x"], "1: $(date) is not run"),
        ("ARGS=(--key ${KEY})", ["--key", "${KEY}"], "1: ${KEY} is not set here: it stays as it is written"),
        ("ARGS=(a)\nif nvidia-smi; then\n ARGS+=(b)\nfi", ["a"], "2: ARGS depends on a condition that is not known"),
        ('if nvidia-smi; then X=1; else X=0; fi\nARGS=("$X")', ["${X}"], "1: X depends on a condition"),
        ("ARGS=(a)\nwhile read x; do ARGS+=($x); done", ["a"], "2: ARGS depends on a loop whose turns"),
        ('M=$(uname)\ncase "$M" in L*) ARGS=(a);; esac', [], "2: ARGS depends on a `case`"),
        ("ARGS=(a)\nARGS[3]=b", ["a"], "2: ARGS[...] is set by its index"),
        ("read X\nARGS=($X)", ["$X"], "1: read is not run"),
        ("X=abc\nARGS=(${X/a/b})", ["${X/a/b}"], "2: ${X/a/b} is not followed"),
        ("ARGS=(${NONE[@]})\nARGS+=(x)", ["x"], "1: NONE is set nowhere"),
        ("ls && ARGS=(a)", [], "1: ARGS depends on a condition"),
    ],
)
def test_what_is_not_known_stays_as_it_is_written_and_is_named_by_its_line(
    tmp_path: pathlib.Path, text: str, kept: list[str], said: str
):
    found = read(tmp_path, f"{text}\n{START}\n")
    assert [word.text for word in found.start.words] == kept
    assert any(said in note for note in unknown(found)), unknown(found)


def test_what_nothing_needs_costs_nothing(tmp_path: pathlib.Path):
    text = 'N=$(nvidia-smi | wc -l)\nif [ "$N" -gt 0 ]; then V=1; else V=0; fi\necho $V\nsleep `expr 1 + 1`\nARGS=(a)\n'
    assert words(tmp_path, text + START) == ["a"]


def test_nothing_is_run(tmp_path: pathlib.Path):
    target = tmp_path / "touched"
    text = f"touch {target}\nX=$(touch {target})\nY=`touch {target}`\nrm -rf {tmp_path}/run.sh\nARGS=(a)\n{START}\n"
    assert words(tmp_path, text) == ["a"]
    assert not target.exists() and (tmp_path / "run.sh").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo nothing\n", "starts slime 0 times: nowhere"),
        ("python3 train.py --a\n\npython3 train.py --b\n", "starts slime 2 times"),
        ("bash -c 'cd x; python3 train.py --a'\n", "run.sh:1: slime is started by a text that another shell reads"),
        ('A="x\npython3 train.py', "a text in quotes without its end"),
        ("A=(1\n", "run.sh:2: an array without its end"),
        ("if true; then\n python3 train.py\n", "an `if` without `fi`"),
        ("\nselect x in a b; do echo; done\n", "run.sh:2: 'select' is not read here"),
        ("f() { f; }\nf\npython3 train.py\n", "functions or files that call themselves"),
        ("source run.sh\npython3 train.py\n", "files that read one another without end"),
        ("for ((i=0; i<1; j++)); do A=1; done\npython3 train.py\n", "a loop of more than 10000 turns"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(tmp_path: pathlib.Path, text: str, said: str):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert said in caught.value.message, caught.value.message


def test_a_program_is_no_shell_script(tmp_path: pathlib.Path):
    (tmp_path / "run.py").write_text("execute_train()")
    with pytest.raises(UsageError, match="only shell scripts are read"):
        follow(tmp_path / "run.py", {})
    with pytest.raises(UsageError, match="cannot be read"):
        follow(tmp_path / "none.sh", {})
