#!/usr/bin/env bash
# Generates the Python stubs and their types from protos/ into gen/.
set -euo pipefail
rm -rf gen && mkdir -p gen
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m grpc_tools.protoc -I protos \
  --python_out=gen --grpc_python_out=gen --mypy_out=quiet:gen --mypy_grpc_out=quiet:gen \
  $(cd protos && find threadloom -name '*.proto' | sort)
touch gen/.built
