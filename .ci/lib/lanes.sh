# Stages, and commands that run beside the rest, each in a process group of its own. Sourced by .ci/run.
say() { # STAGE
  printf '\n=== %s (%s s)\n' "$1" "$SECONDS"
  note "$1"
}
note() { # STAGE: for .ci/minutes.py
  [ ! -r /proc/stat ] || printf '%s\t%s\t%s%s\n' "$lane" "$SECONDS" "$(grep -E '^(cpu |processes)' /proc/stat | tr '\n' '\t')" "$1" >>"$work/stages"
}
spent() { # NAME: the processor time of all that this shell has waited for, for .ci/minutes.py
  local own
  [ ! -r /proc/self/stat ] || { read -r -a own <"/proc/$BASHPID/stat" && echo "$((own[15] + own[16])) $1" >>"$work/spent"; }
}
lane=main
failed() { # NAME: what is listed at the end
  printf '\n=== FAILED: %s (%s s)\n' "$1" "$SECONDS"
  echo "$1" >>"$work/failed"
}
attempt() { # NAME COMMAND…: in a subshell, where its first failure ends it. A failure is listed, and the rest goes on
  local status
  set +e
  ( trap "spent '$1'" EXIT; set -e; "${@:2}" )
  status=$?
  set -e
  [ $status = 0 ] || failed "$1"
}
declare -A lanes=() ended=() # name -> process group; name -> exit status
beside() {                   # NAME COMMAND…: its output goes to $work/NAME.log, and is printed when it ends
  set -m                     # a process group of its own, so that it can be ended with all that it has started
  {
    set +m
    lane=$1
    trap 'echo $? >"$work/$lane.ending"; spent "lane $lane"; mv "$work/$lane.ending" "$work/$lane.status"' EXIT
    note "lane $lane"
    "${@:2}"
    note end
  } </dev/null >"$work/$1.log" 2>&1 &
  set +m
  lanes[$1]=$!
}
running() { # NAME…: whether any of them does
  local name
  for name; do [ -z "${lanes[$name]:-}" ] || return 0; done
  return 1
}
quiet_lanes="packages kubernetes-build fresh torch" # their logs are printed only if they fail
await() { # NAME…: until these have ended; fails if one of them has. Failures of all lanes that end meanwhile are listed
  local name
  while running "$@"; do
    for name in "${!lanes[@]}"; do
      if [ -e "$work/$name.status" ]; then
        ended[$name]=$(<"$work/$name.status")
      elif ! kill -0 "${lanes[$name]}" 2>/dev/null && [ ! -e "$work/$name.status" ]; then
        ended[$name]=137
        echo 137 >"$work/$name.status" # killed. `wait -n` would say it, but knows nothing of a lane that ended before another was waited for
      else
        continue
      fi
      unset "lanes[$name]"
      if [ "${ended[$name]}" != 0 ] || [[ " $quiet_lanes " != *" $name "* ]]; then cat "$work/$name.log"; fi
      [ "${ended[$name]}" = 0 ] || failed "$name"
    done
    ! running "$@" || sleep 1
  done
  for name; do [ "${ended[$name]:-0}" = 0 ] || return 1; done
}

end_lanes() {
  local group turn
  for group in "${lanes[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
  for group in "${lanes[@]}"; do
    for turn in $(seq 50); do kill -0 -- "-$group" 2>/dev/null || break; sleep .1; done
    kill -KILL -- "-$group" 2>/dev/null || true
  done
}
