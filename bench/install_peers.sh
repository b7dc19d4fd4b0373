#!/usr/bin/env bash
# Puts the peers into environments of their own below .bench. Called by make bench-peers.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
here=bench/peers there=.bench

if ! command -v npm >/dev/null || ! npm --version >/dev/null 2>&1; then
  echo "The AI SDK's packages come with npm (of Node 18 or newer), and there is none. On Debian: apt install npm" >&2
  exit 1
fi
for version in ai-6 ai-7; do
  echo "The AI SDK, ${version#ai-}, into $there/$version ..."
  mkdir -p "$there/$version"
  cp "$here"/node/$version/{package.json,package-lock.json,.npmrc} "$there/$version/"
  # No scripts: none of these packages needs any. Errors only: version 7 brings a Node of its own, so the age of the
  # one that runs npm is no matter.
  npm ci --prefix "$there/$version" --ignore-scripts --loglevel=error
done

environment() { # folder, requirements
  "$python" -m venv --clear "$1"
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --require-hashes -r "$2"
}
echo "pydantic-ai into $there/pydantic_ai ..."
environment "$there/pydantic_ai" "$here/pydantic_ai/requirements.txt"
echo "The sampling profiler into $there/tools ..."
environment "$there/tools" bench/tools.txt
echo "Installed. Now: make bench"
