#!/usr/bin/env bash
# A real Slurm of one node on loopback, for tests: no systemd, no cgroups, everything below one directory.
#   single_node.sh start DIRECTORY [CPUS]     prints the path for SLURM_CONF
#   single_node.sh stop DIRECTORY
# Commands that are missing are installed from Debian's packages where that is possible.
set -euo pipefail

action=${1:?start or stop}
root=${2:?a directory}
cpus=${3:-2}
port=${SLURM_TEST_PORT:-26817} # slurmctld's; slurmd has the next
node=$(hostname -s)
export SLURM_CONF=$root/slurm.conf

is_running() { # PIDFILE NAME: whether that process lives. A zombie does not: where there is no init, it stays.
    local pid
    pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] || return 1
    [ "$(awk '/^Name:/ {name = $2} /^State:/ {state = $2} END {print state == "Z" ? "" : name}' \
        "/proc/$pid/status" 2>/dev/null)" = "$2" ]
}

stop_one() { # PIDFILE NAME
    is_running "$1" "$2" || return 0
    local pid
    pid=$(cat "$1")
    kill -TERM "$pid"
    for _ in $(seq 200); do
        is_running "$1" "$2" || return 0
        sleep 0.05
    done
    kill -KILL "$pid"
}

if [ "$action" = stop ]; then
    if timeout 5 scontrol ping >/dev/null 2>&1; then
        timeout 10 scancel --full --user="$(id -un)" 2>/dev/null || true
        for _ in $(seq 100); do
            [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
            sleep 0.1
        done
    fi
    stop_one "$root/slurmd.pid" slurmd
    stop_one "$root/slurmctld.pid" slurmctld
    stop_one "$root/munged.pid" munged
    exit 0
fi

missing=$(for name in slurmctld slurmd sbatch munged; do command -v "$name" >/dev/null || echo "$name"; done)
if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "these tests need Slurm; missing:" $missing "(Debian: apt-get install slurmctld slurmd slurm-client munge)" >&2
        exit 3
    fi
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client munge >/dev/null
fi
if [ "$(id -u)" != 0 ]; then
    echo "these tests need root: slurmd starts jobs as their users" >&2
    exit 3
fi

# The daemons look their own host name up.
getent hosts "$node" >/dev/null || echo "127.0.0.1 $node" >>/etc/hosts

umask 022
mkdir -p "$root"/{state,spool,log}
chmod 755 "$root" "$root/spool"
chmod 700 "$root/state"
if [ ! -s "$root/munge.key" ]; then
    (umask 077 && head -c 1024 /dev/urandom >"$root/munge.key")
    chmod 400 "$root/munge.key"
fi
memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
cat >"$root/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$port
SlurmdPort=$((port + 1))
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# cred_expire is how long a requeued job waits: 120 s by default, at least 5.
AuthInfo=socket=$root/munge.sock,cred_expire=5
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd.pid
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$root/log/jobcomp.txt
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=5
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=$node NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=batch Nodes=$node Default=YES MaxTime=1-0 DefaultTime=10 State=UP PriorityTier=1 GraceTime=0 PreemptMode=REQUEUE
PartitionName=graceful Nodes=$node MaxTime=1-0 DefaultTime=10 State=UP PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE
PartitionName=urgent Nodes=$node MaxTime=1-0 DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF
CONF

# Each goes into the background and writes its pid file. --force: munged would refuse a socket below a
# directory that others cannot enter.
is_running "$root/munged.pid" munged || {
    rm -f "$root"/munge.sock*
    munged --force --key-file="$root/munge.key" --socket="$root/munge.sock" --pid-file="$root/munged.pid" \
        --seed-file="$root/munge.seed" --log-file="$root/log/munged.log" --num-threads=2 \
        </dev/null >>"$root/log/out" 2>&1
}
is_running "$root/slurmctld.pid" slurmctld || slurmctld -f "$SLURM_CONF" </dev/null >>"$root/log/out" 2>&1
is_running "$root/slurmd.pid" slurmd || slurmd -f "$SLURM_CONF" </dev/null >>"$root/log/out" 2>&1

for _ in $(seq 150); do
    state=$(timeout 5 sinfo -h -N -p batch -o %T 2>/dev/null | head -1 || true)
    case $state in
    idle | mixed | allocated)
        echo "$SLURM_CONF"
        exit 0
        ;;
    down* | drain*) scontrol update nodename="$node" state=resume 2>/dev/null || true ;;
    esac
    sleep 0.2
done
echo "the node did not come up: '$state'" >&2
tail -20 "$root"/log/* >&2
exit 1
