# shellcheck shell=bash
# What all job scripts share. Settings (environment of `sbatch`):
#   MEGARL_HOME     checkout with configs/ and slurm/ (default: where sbatch was called)
#   MEGARL_SETUP    how a node gets Python: venv:PATH (default venv:$MEGARL_HOME/.venv), module:NAME,NAME,
#                   pyxis:IMAGE, apptainer:IMAGE, none; several in order, separated by ; as in "module:cuda;venv:PATH"
#   MEGARL_MOUNTS   folders that a container sees beside MEGARL_HOME, as SRC:DST,SRC:DST
#   MEGARL_REQUEUES how often a job that was stopped before its end is queued again (default 100)
#   MEGARL_CPUS     CPUs that every node must have for the job, else it ends at once (default 2, and 2 for each GPU)
set -euo pipefail
export MEGARL_HOME=${MEGARL_HOME:-$SLURM_SUBMIT_DIR}
cd "$MEGARL_HOME"

# One secret for the job: every port asks for it. It is in the environment only.
MEGARL_JOB_KEY=${MEGARL_JOB_KEY:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}
# The first node is the head; the address is the one that Slurm itself reaches it at.
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${names%%$'\n'*}  # not `| head`: it closes the pipe early, which `pipefail` makes the job's end
MEGARL_HEAD=${MEGARL_HEAD:-$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}
# What was submitted, for an error that says how to submit it with other nodes.
submitted=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
MEGARL_COMMAND=${submitted%%$'\n'*}
export MEGARL_JOB_KEY MEGARL_HEAD MEGARL_COMMAND

# load_modules NAME,NAME: the `module` command is a shell function, which a batch job may lack.
load_modules() {
  local file name
  for file in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
    type module &>/dev/null || { [ -r "$file" ] && source "$file"; }
  done
  type module &>/dev/null || { echo "MEGARL_SETUP=$MEGARL_SETUP: this node has no module command" >&2; exit 2; }
  for name in ${1//,/ }; do
    module load "$name" && module is-loaded "$name" || { echo "module load $name failed on $(hostname)" >&2; exit 2; }
  done
}

# Not --kill-on-bad-exit: when a supervisor dies, the head may go on without its node; when the head does, the others
# end themselves. --no-kill: nor when a node is lost; a job submitted without it is then queued again as a whole.
# --cpu-bind=none: a supervisor and its children use every CPU that the job has on their node, not those of one task.
srun_options=(--ntasks-per-node=1 --no-kill --cpu-bind=none)
launch=()
IFS=';' read -ra setups <<<"${MEGARL_SETUP:-venv:$MEGARL_HOME/.venv}"
for setup in "${setups[@]}"; do
  case $setup in
    venv:*) source "${setup#venv:}/bin/activate" ;;
    module:*) load_modules "${setup#module:}" ;;
    pyxis:*)
      srun_options+=(--container-image="${setup#pyxis:}" --container-workdir="$MEGARL_HOME"
        --container-mounts="$MEGARL_HOME:$MEGARL_HOME${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}") ;;
    apptainer:*)
      launch=(apptainer exec --nv --pwd "$MEGARL_HOME" --bind "$MEGARL_HOME${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}"
        "${setup#apptainer:}") ;;
    none) ;;
    *) echo "MEGARL_SETUP=$setup: give venv:PATH, module:NAMES, pyxis:IMAGE, apptainer:IMAGE or none" >&2; exit 2 ;;
  esac
done

# check_cpus: refuse a job that got fewer CPUs on a node than its processes need to make progress.
check_cpus() {
  local least=${MEGARL_CPUS:-$((2 * (${SLURM_GPUS_ON_NODE:-0} > 1 ? SLURM_GPUS_ON_NODE : 1)))} list entry cpus
  # "16(x2),4": CPUs of nodes in a row; a heterogeneous job has a list for each component.
  for list in "${!SLURM_JOB_CPUS_PER_NODE@}"; do
    for entry in ${!list//,/ }; do
      cpus=${entry%%(*}
      [ "$cpus" -ge "$least" ] && continue
      echo "a node of this job has $cpus CPUs ($list=${!list}), megarl needs $least: submit with --exclusive or" \
        "--cpus-per-task=$least (SBATCH_ARGS of array_sweep.sh), or set MEGARL_CPUS=$cpus to run with so few" >&2
      exit 2
    done
  done
}
check_cpus

# megarl_train DEFAULT... -- OVERRIDE...: defaults whose key no override gives, then the overrides.
megarl_train() { megarl_command train "$@"; }

# megarl_command COMMAND DEFAULT... -- OVERRIDE...: the same for any command that takes overrides.
megarl_command() {
  local command=$1 defaults=() key
  shift
  while [ "$1" != -- ]; do defaults+=("$1"); shift; done
  shift
  local overrides=("$@")
  for default in "${defaults[@]}"; do
    key=${default%%=*}
    [[ " $* " == *" $key="* ]] || overrides+=("$default")
  done
  megarl_srun "$command" "${overrides[@]}"
}

# status_folder ARGUMENTS: folder that the head sees from its container too: the run's directory, where it is given
# without interpolation and escapes, else that of all runs.
status_folder() {
  local argument folder=$MEGARL_HOME/runs
  for argument in "$@"; do
    [[ $argument == run.dir=?* && $argument != *[\$\\]* ]] && folder=${argument#run.dir=} folder=${folder//[\'\"]/}
  done
  echo "$folder"
}

# megarl_srun ARGUMENTS: one supervisor on every node; in a heterogeneous job the first component trains, the others have
# the engines. A job that was stopped before its end (status 130: the time limit is near, or `scancel --signal=TERM`) has
# saved a checkpoint and is queued again; it goes on from there.
megarl_srun() {
  local status=0 step=() group nodes
  if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
    MEGARL_NODES=0
    for ((group = 0; group < SLURM_HET_SIZE; group++)); do
      nodes=SLURM_JOB_NUM_NODES_HET_GROUP_$group
      MEGARL_NODES=$((MEGARL_NODES + ${!nodes}))
      [ "$group" = 0 ] || step+=(:)
      step+=(--het-group="$group" "${srun_options[@]}" env MEGARL_ROLE="$([ "$group" = 0 ] && echo trainer || echo rollout)" "${launch[@]}" megarl "$@")
    done
    export MEGARL_NODES
  else
    step=("${srun_options[@]}" "${launch[@]}" megarl "$@")
  fi
  local folder
  folder=$(status_folder "$@")
  rm -f "$folder/.slurm-status-$SLURM_JOB_ID-"*  # of a start of this job that was killed
  MEGARL_STATUS=
  if mkdir -p "$folder" && MEGARL_STATUS=$(mktemp "$folder/.slurm-status-$SLURM_JOB_ID-XXXXXX"); then
    trap 'rm -f "$MEGARL_STATUS"' EXIT
  fi
  export MEGARL_STATUS
  srun "${step[@]}" || status=$?
  # The head's command writes its status there. srun's is the largest of all nodes', lost ones too.
  status=$([ -s "$MEGARL_STATUS" ] && cat "$MEGARL_STATUS" || echo "$status")
  rm -f "$MEGARL_STATUS"
  finish "$status"
}

finish() {
  if [ "$1" = 130 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MEGARL_REQUEUES:-100}" ]; then
    echo "stopped before the end: queued again (${SLURM_RESTART_COUNT:-0} times so far)"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$1"
}
