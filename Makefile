# Each target is one command; `tests/run` and `install.sh` do the work and need no make.

.PHONY: test check test-unit test-integration test-e2e golden install try

test:
	tests/run all

check:
	tests/run lint
	tests/run unit

test-unit:
	tests/run unit

test-integration:
	tests/run integration

test-e2e:
	tests/run e2e

# Rewrites the command lines, units and texts that tests compare with; read the diff.
golden:
	TUNERD_TEST_UPDATE_GOLDEN=1 tests/run unit -k golden
	TUNERD_TEST_UPDATE_GOLDEN=1 tests/run integration -k golden

install:
	./install.sh --system

try:
	./install.sh --try
