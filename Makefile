# The two commands of this project are `make demo` and `make test`; both set up .venv first.
.PHONY: setup lint check test demo bench conversions matrix layouts schedules options scripts conversations

setup:
	@bash ci/setup.sh

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check -q .
	@.venv/bin/basedpyright

# Lint and the tests that need no engine, but for a few that wait for seconds: under a minute.
check: lint
	@.venv/bin/python -m pytest tests -m "not engine and not slow" -n auto --dist worksteal

test: lint
	@bash ci/test.sh

demo: setup
	@bash ci/demo.sh

bench: setup
	@.venv/bin/python -m bench

# The quickstart under every schedule, as it is and killed at five moments: an hour on 2 cores.
schedules: setup
	@.venv/bin/python -m bench.learning

matrix: setup
	@.venv/bin/python -m bench.matrix

# Layouts of four and eight ranks against one process: half an hour on 2 cores.
layouts: setup
	@.venv/bin/python -m bench.layouts

options: setup
	@.venv/bin/python -m bench.options_page
	@.venv/bin/python -m bench.moving_page

# slime's own launch scripts under `slime train --dry-run`: which pass, and what is refused in the others.
scripts: setup
	@.venv/bin/python -m bench.scripts

conversions: setup
	@.venv/bin/python -m bench.conversions

# docs/conversations.md: what is trained of 26 kinds of conversation with public chat templates.
conversations: setup
	@.venv/bin/python -m bench.conversations_page
