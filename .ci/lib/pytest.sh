# Tests of a lane, whose failures may be looked at again behind everything else. Sourced by .ci/run.
reports=$work/reports
prefix=() # a command that runs pytest

longest_first=(--no-loadscope-reorder) # with ORTFLOW_DURATIONS, see tests/support/longest_first.py

judged() { # LANE PYTEST-ARGUMENTS…: passes if all tests pass, or all that fail may be run again (.ci/once_more.py). Runs "$pytest"
  local lane=$1 status=0
  shift
  "$bin/python" .ci/once_more.py record "$reports/$lane" -- "$pytest" -q --hypothesis-profile=ci
  "${prefix[@]}" "$pytest" -q --hypothesis-profile=ci --report-log="$reports/$lane.jsonl" "$@" || status=$?
  case $status in
    0) ;;
    1) "$bin/python" .ci/once_more.py defer "$reports/$lane" ;;
    *) return $status ;;
  esac
}
