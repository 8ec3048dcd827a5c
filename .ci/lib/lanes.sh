# Stages, and commands that run beside the rest, each in a process group of its own. Sourced by .ci/run.
say() { # STAGE
  printf '\n=== %s (%s s)\n' "$1" "$SECONDS"
  note "$1"
}
note() { # STAGE: for .ci/minutes.py
  [ ! -r /proc/stat ] || printf '%s\t%s\t%s%s\n' $BASHPID "$SECONDS" "$(grep -E '^(cpu |processes)' /proc/stat | tr '\n' '\t')" "$1" >>"$work/stages"
}
declare -A lanes=() # name -> process group
beside() {          # NAME COMMAND…: its output goes to $work/NAME.log, and is printed when it ends
  set -m            # a process group of its own, so that it can be ended with all that it has started
  { set +m; note "lane $1"; "${@:2}"; note end; } </dev/null >"$work/$1.log" 2>&1 &
  set +m
  lanes[$1]=$!
}
running() { # NAME…: whether any of them does
  local name
  for name; do [ -z "${lanes[$name]:-}" ] || return 0; done
  return 1
}
quiet_lanes="packages kubernetes-build fresh torch" # their logs are printed only if they fail
await() { # NAME…: until these have passed; the first failure of any lane ends all
  local name ended status
  while running "$@"; do
    status=0
    wait -n -p ended "${lanes[@]}" || status=$?
    for name in "${!lanes[@]}"; do [ "${lanes[$name]}" != "$ended" ] || break; done
    unset "lanes[$name]"
    if [ $status != 0 ] || [[ " $quiet_lanes " != *" $name "* ]]; then cat "$work/$name.log"; fi
    [ $status = 0 ] || { say "FAILED: $name"; exit 1; }
  done
}

end_lanes() {
  local group turn
  for group in "${lanes[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
  for group in "${lanes[@]}"; do
    for turn in $(seq 50); do kill -0 -- "-$group" 2>/dev/null || break; sleep .1; done
    kill -KILL -- "-$group" 2>/dev/null || true
  done
}
