# Sourced by the scripts in this folder: creates the virtual environment .venv and reports progress.

fail() {
  printf 'error: %s\n' "$1" >&2
  [ -z "${2:-}" ] || printf 'hint: %s\n' "$2" >&2
  exit 1
}

say() { printf '%s\n' "== $1"; }

# Print a Python of 3.10 or newer: the one in PYTHON, else the newest on PATH that runs.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.15 python3.14 python3.13 python3.12 python3.11 python3.10 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "dtrain needs Python 3.10 or newer; found ${PYTHON:-$(python3 --version 2>&1 || true)}" \
    "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

as_root() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# Install distribution packages. Debian and Ubuntu only; callers are root.
apt_install() {
  say "installing from the distribution: $*"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "$@" >/dev/null; } ||
    fail "apt-get could not install $*" "run 'apt-get update && apt-get install $*' to see why"
}

make_venv() {
  local python=$1 version
  say "creating .venv with $("$python" --version)"
  if "$python" -c 'import ensurepip, venv' 2>/dev/null && "$python" -m venv .venv; then return; fi
  rm -rf .venv
  # Debian and Ubuntu ship python3 without venv.
  if "$python" -m virtualenv --version >/dev/null 2>&1; then
    "$python" -m virtualenv --quiet .venv && return
  fi
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if as_root; then
    apt_install "python$version-venv"
    "$python" -m venv .venv && return
  fi
  fail "$python cannot create virtual environments: its venv or ensurepip module is missing" \
    "sudo apt-get install python$version-venv (Debian, Ubuntu), or pip install virtualenv"
}

# prepare EXTRA [REQUIREMENT…]: install this checkout with an extra, and the requirements, in .venv.
# Does nothing if that was done before with the same pyproject.toml.
prepare() {
  local extra=$1 python stamp wanted log status downloads missing
  shift
  if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    rm -rf .venv
    python=$(find_python) || exit 1
    make_venv "$python"
  fi
  stamp=.venv/.dtrain-$extra
  wanted=$(.venv/bin/python - "$PWD" "$@" <<'PY'
import hashlib, sys
print(hashlib.sha256(open("pyproject.toml", "rb").read() + repr(sys.argv).encode()).hexdigest())
PY
)
  [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
  case $extra in
    quick) downloads="test tools" ;;
    torch) downloads="PyTorch" ;;
    *) downloads="PyTorch, TensorFlow and test tools" ;;
  esac
  say "installing dtrain[$extra] into .venv; the first time downloads $downloads and takes minutes"
  log=.venv/install.log
  # Show only the large downloads of pip's output.
  set +e
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile \
    -e ".[$extra]" "$@" 2>&1 | tee "$log" |
    sed -nu -e 's/^ *Downloading \([^ ]*\/\)\{0,1\}\([^/ ]*\) \((.* [MG]B)\)$/  downloading \2 \3/p' \
      -e 's/^Installing collected packages:.*/  unpacking/p'
  status=${PIPESTATUS[0]}
  set -e
  if [ "$status" != 0 ]; then
    # Every Python supports hatchling, so an error about it means that there is no index.
    if grep -qiE 'connection (broken|error|refused|reset)|name resolution|timed out|unreachable|proxyerror|found for hatchling' "$log"; then
      fail "packages could not be downloaded" \
        "is this machine online? pip obeys https_proxy, and PIP_INDEX_URL for a mirror"
    fi
    if missing=$(grep -m 1 'No matching distribution found for' "$log"); then
      fail "no package${missing##*found} that $(.venv/bin/python --version) can use" \
        "remove .venv, then choose another Python: PYTHON=/path/to/python3.12 $0"
    fi
    tail -n 5 "$log" >&2
    fail "pip could not install dtrain[$extra]" "see its output in $log"
  fi
  # pip compiles on one core. Some packages have files for other Pythons, which do not compile.
  .venv/bin/python -m compileall -qq -j 0 .venv/lib/python*/site-packages || true
  printf '%s\n' "$wanted" >"$stamp"
}

# Install the programs of tests/programs, which dtrain does not depend on, in .venv/programs. That
# environment also has the packages of .venv, so torch and TensorFlow are not installed twice.
prepare_programs() {
  local place=.venv/programs list=tests/programs/requirements.txt stamp wanted site
  stamp=$place/.dtrain-programs
  wanted=$(cat pyproject.toml "$list" | sha256sum)
  [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
  say "installing the programs of tests/programs into $place"
  .venv/bin/python -m venv --without-pip --clear "$place"
  site="import sysconfig; print(sysconfig.get_path('purelib'))"
  printf 'import site; site.addsitedir("%s")\n' "$(.venv/bin/python -c "$site")" \
    >"$("$place/bin/python" -c "$site")/dtrain.pth"
  .venv/bin/python -m pip freeze --exclude-editable >"$place/constraints.txt"
  "$place/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar off \
    --constraint "$place/constraints.txt" --requirement "$list" >"$place/install.log" 2>&1 ||
    { tail -n 5 "$place/install.log" >&2; fail "pip could not install $list" \
      "see its output in $place/install.log"; }
  printf '%s\n' "$wanted" >"$stamp"
}
