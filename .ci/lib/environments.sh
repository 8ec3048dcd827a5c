# Python environments, copied from the user's cache if the same packages were installed there this month. Sourced by .ci/run.
environments=${ORTFLOW_CACHE:-$HOME/.cache/ortflow}/ci/environments
environments_limit=20000 # MiB: one whole run uses 9,000

# A distribution builds CPython with a profile, pyenv without: an import and a run then take a tenth more of the processor.
find_python() { # VERSION…: the first of them that runs, and makes environments (Debian's needs python3-venv for it)
  local version candidate
  for version; do
    for candidate in "/usr/bin/python$version" "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
      if "$candidate" -c "import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
        command -v "$candidate" && return
      fi
    done
  done
  return 1
}

environment() { # NAME PYTHON COMMAND…: a venv in $work/NAME, filled by COMMAND, which installs with "$pip", and without ortflow
  local folder=$work/$1 python=$2 key cached
  shift 2
  # The month: a new release of a package that is not pinned is met within weeks.
  key=$({
    "$python" -VV && uname -m && date +%Y-%m && echo "${@//$root/}" && declare -f "$1"
    [ "$1" = packages ] || cat .ci/install_torch .ci/build_horovod
    # Not all of pyproject.toml: a new extra, or another text about the project, installs nothing here.
    "$newest_python" .ci/requirements.py "$@"
  } | sha256sum | cut -c1-16)
  cached=$environments/$key
  echo "$key $folder" >>"$work/environments"
  if [ -e "$cached/folder" ]; then
    touch "$cached"
    copy_linked "$cached" "$folder"
    if [ -d "$cached.bytecode" ]; then
      touch "$cached.bytecode"
      mkdir -p "$PYTHONPYCACHEPREFIX$folder"
      copy_linked "$cached.bytecode" "$PYTHONPYCACHEPREFIX$folder/lib"
    fi
    # Scripts name the folder of their venv.
    grep -rlIZ --exclude-dir=lib "$(cat "$cached/folder")" "$folder" | xargs -0r sed -i "s#$(cat "$cached/folder")#$folder#g"
    return
  fi
  "$python" -m venv "$folder"
  pip=$folder/bin/pip "$@"
  "$folder/bin/pip" uninstall -q -y ortflow
  echo "$folder" >"$folder/folder"
  mkdir -p "$environments"
  copy_linked "$folder" "$cached.$$" && { mv -T "$cached.$$" "$cached" 2>/dev/null || rm -rf "$cached.$$"; }
}

keep_bytecode() { # what was imported from each environment, compiled. Of a changed source Python takes none of it
  local key folder kept
  while read -r key folder; do
    kept=$environments/$key.bytecode
    [ -d "$environments/$key" ] && [ -d "$PYTHONPYCACHEPREFIX$folder/lib" ] || continue
    copy_linked "$PYTHONPYCACHEPREFIX$folder/lib" "$kept.$$" && rm -rf "$kept" && { mv -T "$kept.$$" "$kept" 2>/dev/null || rm -rf "$kept.$$"; }
  done <"$work/environments"
}

prune_environments() { # those used longest ago, as far as all together are over the limit; and what a killed run copied in part
  local size=0 cached
  find "$environments" -mindepth 1 -maxdepth 1 -name '*.[0-9]*' -mtime +0 -exec rm -rf {} +
  while read -r _ cached; do
    size=$((size + $({ du -sm "$cached" "$cached.bytecode" 2>/dev/null || true; } | awk '{ sum += $1 } END { print sum + 0 }')))
    [ "$size" -le "$environments_limit" ] || rm -rf "$cached" "$cached.bytecode"
  done < <(find "$environments" -mindepth 1 -maxdepth 1 ! -name '*.*' -printf '%T@ %p\n' | sort -rn)
}

copy_linked() { # FROM TO: with hard links where both are on one file system. pip replaces files and changes none
  cp -al "$1" "$2" 2>/dev/null || { rm -rf "$2" && cp -a "$1" "$2"; }
}
