# Every task of the project. `make` alone lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
STUBS := gen/.built
PROTOS := $(shell find protos -name '*.proto')
# Order of the tests and their made-up inputs; another one: make test SEED=7
SEED ?= 1
SEEDED := -p no:cacheprovider --randomly-seed=$(SEED) --hypothesis-seed=$(SEED) -q

.PHONY: help install stubs run stop logs reset project token price provider-key test test-long check format golden migration docs bench-peers bench clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STUBS) ## Make the virtual environment and the stubs (other targets do it by themselves)

$(INSTALLED): requirements.lock deploy/local/install.sh
	@PYTHON=$(PYTHON) bash deploy/local/install.sh

$(STUBS): $(INSTALLED) $(PROTOS) deploy/local/stubs.sh
	@bash deploy/local/stubs.sh

stubs: $(STUBS) ## Generate the gRPC stubs into gen/

run: $(STUBS) ## Start the whole stack; Ctrl-C stops it
	@$(BIN)/python -m deploy.local up

stop: $(STUBS) ## Stop a stack that runs in another terminal
	@$(BIN)/python -m deploy.local stop

logs: $(STUBS) ## Follow a service's log: make logs SERVICE=gateway
	@$(BIN)/python -m deploy.local logs "$(SERVICE)"

reset: $(STUBS) ## Delete the data of a stack that is stopped
	@$(BIN)/python -m deploy.local reset

project: $(STUBS) ## Create a project: make project NAME=acme
	@$(BIN)/python -m deploy.local project "$(NAME)"

token: $(STUBS) ## Mint a user token: make token USER=carol PROJECT=acme
	@$(BIN)/python -m deploy.local token "$(if $(findstring command,$(origin USER)),$(USER))" "$(PROJECT)"

price: $(STUBS) ## Set a model's price: make price MODEL=gpt-x IN=0.15 OUT=0.60
	@$(BIN)/python -m deploy.local price "$(MODEL)" --in="$(IN)" --out="$(OUT)" --cached="$(CACHED)" \
		--cache-write="$(CACHE_WRITE)" --fee="$(FEE)" --project="$(PROJECT)"

provider-key: $(STUBS) ## Keep a project's provider key: make provider-key PROVIDER=openai
	@$(BIN)/python -m deploy.local provider-key "$(PROVIDER)" "$(PROJECT)" $(if $(REMOVE),--remove)

test: $(STUBS) ## Run all tests but the long ones: make test SEED=7
	$(BIN)/pytest tests -m "not long" $(SEEDED)

test-long: $(STUBS) ## Run soaks and kill matrices
	$(BIN)/pytest tests -m long $(SEEDED)

check: $(STUBS) ## Check format, lint, types, import contracts and protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/mypy kit services deploy/local bench
	$(BIN)/lint-imports

format: $(STUBS) ## Format code and protos
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format -w protos

golden: $(STUBS) ## Write the golden frames anew; review the diff
	GOLDEN=write $(BIN)/pytest tests/wire -q

migration: $(STUBS) ## Draft a migration: make migration SERVICE=conversation NAME=add_x
	$(BIN)/python -m deploy.local migration "$(SERVICE)" "$(NAME)"

docs: $(STUBS) ## Write the generated documents anew
	$(BIN)/python docs/generate.py

bench-peers: $(STUBS) ## Install the peers of the bench into .bench (once, about two minutes)
	@PYTHON=$(PYTHON) bash bench/install_peers.sh

bench: $(STUBS) ## Measure Threadloom beside its peers: make bench ARGS="--rounds 1"
	@$(BIN)/python -m bench $(ARGS)

clean: ## Delete what was built (not the data)
	rm -rf .venv .bench gen .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
