# The two commands of this project are `make demo` and `make test`; both set up .venv first.
.PHONY: setup demo test bench conversions matrix

setup:
	@bash ci/setup.sh

demo: setup
	@bash ci/demo.sh

test: setup
	@.venv/bin/python -m pytest tests

bench: setup
	@.venv/bin/python -m slime_cli.bench

matrix: setup
	@.venv/bin/python -m slime_cli.bench.matrix

conversions: setup
	@.venv/bin/python -m slime_cli.bench.conversions
