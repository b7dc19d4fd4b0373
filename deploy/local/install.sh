#!/usr/bin/env bash
# Makes .venv from requirements.lock. Called by make; shows progress, says what to do when it cannot.
set -euo pipefail
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "Threadloom needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1 || echo missing)." >&2
  echo "Name another one: make run PYTHON=/path/to/python3.12" >&2
  exit 1
fi
total=$(grep -cE '^[a-z0-9._-]+==' requirements.lock)
echo "Installing $total packages into .venv (once, about a minute) ..."
rm -f .venv/.installed
if ! "$python" -m venv .venv; then
  echo "Python's venv module does not work here. On Debian and Ubuntu: apt install python3-venv" >&2
  exit 1
fi
# One line a package is progress enough; pip's own chatter only appears when it fails.
log=.venv/install.log
if ! .venv/bin/python -m pip install --disable-pip-version-check --no-input --require-hashes \
    -r requirements.lock 2>&1 | tee "$log" | awk -v total="$total" '
      /^Collecting / { n++; printf "\r  fetching %3d of %d  %-40s", n, total, $2; fflush() }
      /^Installing collected/ { printf "\r  unpacking %-50s", "..."; fflush() }
      END { print "" }'; then
  echo "The installation failed; the end of $log says why:" >&2
  tail -n 15 "$log" >&2
  exit 1
fi
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n%s\n' "$PWD" "$PWD/gen" > "$site/threadloom.pth"
touch .venv/.installed
