#!/usr/bin/env bash
# A Slurm cluster of several nodes on this one machine.
#
#   slurm-cluster.sh up                start it; nothing to do when it runs already
#   slurm-cluster.sh exec CMD...       run CMD on the head node: squeue, sbatch, a test
#   slurm-cluster.sh on NODE CMD...    run CMD on a node, as `ssh NODE CMD` would
#   slurm-cluster.sh stop-slurmd NODE  slurmd dies (kill -9), the jobs' processes live on
#   slurm-cluster.sh kill-node NODE    power cut: all processes of the node die at once
#   slurm-cluster.sh start-node NODE   the node comes back after either of these
#   slurm-cluster.sh status            nodes, states, CPUs, memory, GPUs; exit 1 when down
#   slurm-cluster.sh down              end everything; safe at any time, also twice
#
# The head and each node have network, PID, UTS and mount namespaces of their own: an
# address and all ports, a process table, a host name, an /etc/hosts. The network has no way
# out and no way in. Files are those of this machine, or those of SLURM_ROOT.
#
# Environment:
#   CLUSTER_DIR=/tmp/slurm-cluster     state, logs, configuration; every user must be able to enter it
#   NODES=4 CPUS=8 MEM=2000 GPUS=4     number of nodes, and what each has (MEM in MB)
#   ACCOUNTING=1                       0: no slurmdbd, no MariaDB, no sacct; starts sooner
#   CGROUP=auto                        v1, v2 or none; none means no memory limits, so no OUT_OF_MEMORY
#   NODE_PREFIX=node                   nodes are called node1, node2, ...; control groups go by node
#                                      name, so clusters that run at the same time need different ones
#   TEST_USER=                         an ordinary user to create when there is none of this name
#   KEEP_DB=0                          1: `down` leaves the accounting database for the next `up`
#   SLURM_ROOT=                        a tree made by slurm-root.sh: the daemons and all commands are its programs;
#                                      of this machine they see /tmp, CLUSTER_DIR, the users and TEST_USER's home
#   SLURM_BIND=                        further paths of this machine that they see, one in a line
# Needs root, and the programs that packages.sh installs. Written outside CLUSTER_DIR: TEST_USER and lock files.
set -eEuo pipefail              # E: `up` says which command failed, in functions too

HERE=$(cd "$(dirname "$0")" && pwd)
D=$(realpath -m "${CLUSTER_DIR:-/tmp/slurm-cluster}")
NODES=${NODES:-4} CPUS=${CPUS:-8} MEM=${MEM:-2000} GPUS=${GPUS:-4}
ACCOUNTING=${ACCOUNTING:-1} CGROUP=${CGROUP:-auto} NODE_PREFIX=${NODE_PREFIX:-node} TEST_USER=${TEST_USER:-}
SLURM_ROOT=${SLURM_ROOT:+$(realpath -m "$SLURM_ROOT")} SLURM_BIND=${SLURM_BIND:-}
NET=198.18.100                # from the range for benchmarks (RFC 2544); exists inside the namespaces only
LOCK=/run/lock/gpujob-slurm-$NODE_PREFIX
MARK=gpujob-slurm-host        # with $D, the arguments by which the first process of each host is known
export PATH=$PATH:/usr/sbin:/sbin

die() { echo "slurm-cluster: $*" >&2; exit 1; }

poll() { # SECONDS CMD...: until CMD succeeds
    local end=$((SECONDS + $1)); shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}
wait_for() { # SECONDS WHAT CMD...
    poll "$1" "${@:3}" || die "waited $1 s for $2 (logs: $D/log)"
}

# --- hosts: head, node1, node2, ... ---

pid_of() { cat "$D/run/$1.pid" 2>/dev/null || echo none; }

# Does the first process of this host run? Its pid may belong to a stranger by now.
alive() { grep -qzxF "$MARK" "/proc/$(pid_of "$1.init")/cmdline" 2>/dev/null; }

# Sets `inside` to a command prefix that enters a host, in the same folder where it exists there.
enter() { # HOST
    local pid wd=$PWD
    pid=$(pid_of "$1.init")
    [ -d "/proc/$pid/root$wd" ] || wd=/
    inside=(nsenter --target "$pid" --net --uts --pid --mount --root --wdns="$wd" --
            env SLURM_CONF="$D/etc/slurm.conf")
}
in_host() { # HOST CMD...
    local inside; enter "$1"; shift
    "${inside[@]}" "$@"
}

# A host is a process that holds namespaces open. As the first process of its PID namespace
# it takes all others along when it dies; it ignores SIGCHLD, so that orphans leave no zombies.
# What is mounted for it, in SLURM_ROOT too, goes with its mount namespace.
start_host() { # HOST
    local h=$1 outer binds
    mapfile -t binds < <(visible_paths)
    rm -f "$D/run/$h.ready"
    # shellcheck disable=SC2016
    setsid unshare --net --uts --pid --fork --kill-child --mount --mount-proc -- bash -ec '
        mark=$0 dir=$1 host=$2 root=$3; shift 3
        hostname "$host"
        ip link set lo up
        mount --bind "$dir/etc/hosts" /etc/hosts
        if [ -n "$root" ]; then
            mount -t proc proc "$root/proc"
            mount -t tmpfs -o mode=755 tmpfs "$root/run"
            for path in /sys /dev "$@"; do
                if [ -d "$path" ]; then mkdir -p "$root$path"; else : >>"$root$path"; fi
                mount --rbind "$path" "$root$path"
            done
        fi
        : >"$dir/run/$host.ready"
        exec chroot "${root:-/}" perl -e "\$SIG{CHLD} = q(IGNORE); sleep while 1" "$mark" "$dir" "$host"
        ' "$MARK" "$D" "$h" "$SLURM_ROOT" "${binds[@]}" </dev/null >>"$D/log/$h.init.log" 2>&1 &
    outer=$!
    disown                        # no word from bash when `down` kills it
    wait_for 30 "the namespaces of $h" test -e "$D/run/$h.ready"
    tr -d ' ' <"/proc/$outer/task/$outer/children" >"$D/run/$h.init.pid"
    wait_for 30 "the first process of $h" alive "$h"
}

# Of this machine, what the programs of SLURM_ROOT see: with the users, files have the same owners there.
visible_paths() {
    local home=
    [ -z "$TEST_USER" ] || home=$(getent passwd "$TEST_USER" | cut -d: -f6)
    printf '%s\n' /tmp "$D" /etc/hosts /etc/passwd /etc/group ${home:+"$home"} ${SLURM_BIND:+"$SLURM_BIND"}
}

connect() { # NODE NUMBER: a cable from the node to the bridge on the head
    local head node
    head=$(pid_of head.init) node=$(pid_of "$1.init")
    nsenter -t "$head" --net -- ip link del "v$2" 2>/dev/null || true    # the end of it that a killed node left
    nsenter -t "$head" --net -- ip link add "v$2" type veth peer name eth0 netns "$node"
    nsenter -t "$head" --net -- ip link set "v$2" master br0 up
    nsenter -t "$node" --net -- ip addr add "$NET.$2/24" dev eth0
    nsenter -t "$node" --net -- ip link set eth0 up
}

start_daemon() { # HOST CMD...: one that goes into the background by itself
    in_host "$@" </dev/null >>"$D/log/$1.init.log" 2>&1 ||
        die "$2 of $1 did not start: status $?, $(tail -n 5 "$D/log/$1.init.log") (logs: $D/log)"
}

start_slurmd() { # NODE
    start_daemon "$1" slurmd -N "$1"
    wait_for 30 "slurmd of $1" test -s "$D/run/slurmd.$1.pid"
}

# The processes of this cluster that hold its namespaces, whatever became of the pid files.
holders() {
    local f
    { grep -lzxF -e "$MARK" /proc/[0-9]*/cmdline 2>/dev/null || true; } | while read -r f; do
        if grep -qzxF -e "$D" "$f" 2>/dev/null; then basename "${f%/cmdline}"; fi
    done
}

# Ended, or a zombie that its parent has not collected yet. The first process of a PID namespace
# ends only after all others in it have.
gone() { # PID...
    local p
    for p in "$@"; do
        case $(sed 's/.*) //' "/proc/$p/stat" 2>/dev/null || true) in ''|Z*|X*) ;; *) return 1 ;; esac
    done
}

remove_cgroups() { # PATTERN for the node's name
    local end=$((SECONDS + 10)) left
    while :; do
        find /sys/fs/cgroup -depth -type d \( -path "*/slurm_$1" -o -path "*/slurm_$1/*" \
            -o -path "*/$1_slurmstepd.scope" -o -path "*/$1_slurmstepd.scope/*" \) -exec rmdir {} + 2>/dev/null || true
        left=$(find /sys/fs/cgroup -type d \( -name "slurm_$1" -o -name "$1_slurmstepd.scope" \) 2>/dev/null || true)
        [ -n "$left" ] || return 0
        if [ $SECONDS -ge $end ]; then echo "slurm-cluster: cannot remove ${left//$'\n'/ }" >&2; return 1; fi
        sleep 0.1
    done
}

# --- one cluster for each node prefix ---

# Every process of the cluster inherits the descriptor of the lock, so it is held
# until the last one has ended, even when this script was killed half-way.
lock() { # SECONDS
    mkdir -p "${LOCK%/*}"
    exec 9<>"$LOCK"
    flock -w "$1" 9 || { exec 9>&-; return 1; }
}

refuse_collision() {
    local other f
    if ! lock 0; then
        other=$(cat "$LOCK")
        [ "$other" != "$D" ] ||
            die "$D is being started by another process, or was not shut down completely (then: CLUSTER_DIR=$D $0 down)"
        die "another cluster with nodes called ${NODE_PREFIX}N runs from $other: end it (CLUSTER_DIR=$other $0 down)" \
            "or give this one another NODE_PREFIX"
    fi
    echo "$D" >"$LOCK"
    # One that did not come from this script: it would share our control groups all the same.
    for f in /proc/[0-9]*/comm; do
        if grep -qsx slurmd "$f" && grep -qszxE -e "${NODE_PREFIX}[0-9]+" "${f%comm}cmdline"; then
            die "another Slurm with nodes called ${NODE_PREFIX}N runs here (slurmd is process" \
                "$(basename "${f%/comm}")): end it or give this one another NODE_PREFIX"
        fi
    done
}

# --- configuration ---

installed() { # PROGRAM, among those that the hosts run
    # shellcheck disable=SC2016
    chroot "${SLURM_ROOT:-/}" sh -c 'command -v "$1"' sh "$1" >/dev/null 2>&1
}

check_settings() {
    local p missing=() cure="run $HERE/packages.sh"
    [ "$(id -u)" = 0 ] || die "needs root (namespaces, slurmd)"
    [[ $D =~ ^[A-Za-z0-9_./+-]+$ ]] || die "CLUSTER_DIR=$D: slurm.conf takes letters, digits and _./+- only"
    [[ $NODE_PREFIX =~ ^[a-z]+$ ]] || die "NODE_PREFIX=$NODE_PREFIX: lower-case letters only"
    [ "$NODE_PREFIX" != head ] || die "NODE_PREFIX=head: the head node has that name"
    for p in NODES CPUS MEM GPUS; do
        [[ ${!p} =~ ^[1-9][0-9]*$ ]] || die "$p=${!p}: not a whole number above 0"
    done
    [ "$NODES" -le 250 ] || die "NODES=$NODES: at most 250"
    if [ -n "$SLURM_ROOT" ]; then
        [ -d "$SLURM_ROOT" ] || die "SLURM_ROOT=$SLURM_ROOT: no such folder (make it with $HERE/slurm-root.sh)"
        cure="not in $SLURM_ROOT; make it anew with $HERE/slurm-root.sh"
    fi
    for p in ip nsenter unshare setpriv; do
        command -v "$p" >/dev/null || missing+=("$p")
    done
    for p in munged slurmctld slurmd sinfo ip perl; do installed "$p" || missing+=("$p"); done
    if [ "$ACCOUNTING" = 1 ]; then
        for p in slurmdbd mariadbd mariadb-install-db; do installed "$p" || missing+=("$p"); done
    fi
    [ ${#missing[@]} -eq 0 ] || die "not installed: ${missing[*]} ($cure)"
}

# v1 and v2 need a memory controller that we may write to; containers often have neither.
detect_cgroup() {
    if [ "$CGROUP" != auto ]; then echo "$CGROUP"
    elif grep -qsw memory /sys/fs/cgroup/cgroup.controllers && [ -w /sys/fs/cgroup/cgroup.subtree_control ]; then echo v2
    elif [ -w /sys/fs/cgroup/memory/memory.limit_in_bytes ] && [ -d /sys/fs/cgroup/freezer ]; then echo v1
    else echo none; fi
}

configure() {
    local cg f i dbd='#' v2='#' devices=no store=accounting_storage/none
    local proctrack=proctrack/linuxproc task=task/none gather=jobacct_gather/linux
    cg=$(detect_cgroup)
    case $cg in
        v1|v2) proctrack=proctrack/cgroup task=task/cgroup gather=jobacct_gather/cgroup ;;
        none) echo "slurm-cluster: no memory limits here (CGROUP=none), so no job will be OUT_OF_MEMORY" >&2 ;;
        *) die "CGROUP=$CGROUP: not one of auto, v1, v2, none" ;;
    esac
    [ "$cg" != v2 ] || v2=
    if [ "$cg" = v2 ] || [ "$cg/$(ls -d /sys/fs/cgroup/devices 2>/dev/null)" = v1//sys/fs/cgroup/devices ]; then
        devices=yes
    fi
    [ "$ACCOUNTING" != 1 ] || { store=accounting_storage/slurmdbd dbd=; }
    for f in slurm.conf gres.conf cgroup.conf slurmdbd.conf; do
        sed -e "s|@DIR@|$D|g; s|@NODE@|$NODE_PREFIX|g; s|@NODES@|$NODES|g; s|@CPUS@|$CPUS|g; s|@MEM@|$MEM|g" \
            -e "s|@GPUS@|$GPUS|g; s|@LASTGPU@|$((GPUS - 1))|g; s|@STORE@|$store|g; s|@DBD@|$dbd|g; s|@V2@|$v2|g" \
            -e "s|@PROCTRACK@|$proctrack|g; s|@TASK@|$task|g; s|@GATHER@|$gather|g; s|@CGROUP@|$cg|g; s|@DEVICES@|$devices|g" \
            "$HERE/conf/$f.in" >"$D/etc/$f"
    done
    [ "$cg" != none ] || echo "CgroupPlugin=autodetect" >"$D/etc/cgroup.conf"
    chmod 600 "$D/etc/slurmdbd.conf"
    {
        echo "127.0.0.1 localhost"
        echo "$NET.254 head"
        for i in $(seq "$NODES"); do echo "$NET.$i $NODE_PREFIX$i"; done
    } >"$D/etc/hosts"
    # Numbers of NVIDIA's devices: opening one fails with ENXIO, since there is no driver, or with EPERM outside the
    # step that was given it.
    for i in $(seq 0 $((GPUS - 1))); do
        [ -e "$D/dev/nvidia$i" ] || mknod -m 666 "$D/dev/nvidia$i" c 195 "$i"
    done
    [ -s "$D/etc/munge.key" ] || (umask 077; head -c 1024 /dev/urandom >"$D/etc/munge.key")
    [ -e /etc/hosts ] || : >/etc/hosts       # something to mount the hosts' own file on
    setpriv --reuid=65534 --regid=65534 --clear-groups test -r "$D/etc/slurm.conf" ||
        die "ordinary users cannot read $D/etc/slurm.conf: every folder above it must let them pass (chmod o+x)"
}

# --- commands ---

# Temporary tables are named by process ids, which are equal in all clusters, so each needs a folder of its own.
start_database() {
    local inside sql=(mariadb --no-defaults -S "$D/run/mysql.sock")
    mkdir -p "$D/run/mysql.tmp"
    if [ ! -d "$D/mysql/mysql" ]; then
        in_host head mariadb-install-db --no-defaults --user=root --datadir="$D/mysql" --tmpdir="$D/run/mysql.tmp" \
            --skip-test-db --auth-root-authentication-method=normal >"$D/log/mariadb-install.log" 2>&1 ||
            die "no database was made: status $?, $(grep -m 1 ERROR "$D/log/mariadb-install.log") (logs: $D/log)"
    fi
    enter head
    "${inside[@]}" setsid mariadbd --no-defaults --user=root --datadir="$D/mysql" --tmpdir="$D/run/mysql.tmp" \
        --bind-address=127.0.0.1 --socket="$D/run/mysql.sock" --pid-file="$D/run/mariadb.pid" --log-error="$D/log/mariadb.log" \
        --innodb-buffer-pool-size=128M --innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900 \
        --loose-innodb-snapshot-isolation=OFF </dev/null >/dev/null 2>&1 &
    disown
    wait_for 60 MariaDB in_host head mariadb-admin --no-defaults -S "$D/run/mysql.sock" ping
    in_host head "${sql[@]}" -e "
        CREATE DATABASE IF NOT EXISTS slurm_acct_db;
        CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'slurm';
        CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm';
        GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
        GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';"
    start_daemon head slurmdbd
    wait_for 60 slurmdbd in_host head sacctmgr -n show cluster
}

all_idle() { [ "$(in_host head sinfo -h -N -t idle -o %N | sort -u | wc -l)" = "$NODES" ]; }

up() {
    local i h settings="NODES=$NODES CPUS=$CPUS MEM=$MEM GPUS=$GPUS ACCOUNTING=$ACCOUNTING NODE_PREFIX=$NODE_PREFIX"
    settings+=" SLURM_ROOT=$SLURM_ROOT"
    check_settings
    if alive head && [ -e "$D/run/settings" ]; then
        [ "$(cat "$D/run/settings")" = "$settings" ] ||
            die "$D already runs with $(cat "$D/run/settings"), not with $settings"
        echo "already up: $D"
        return
    fi
    refuse_collision
    trap 'rc=$?; trap - EXIT; down; exit $rc' EXIT
    trap 'echo "slurm-cluster: status $? of line $LINENO: $BASH_COMMAND" >&2' ERR
    remove_cgroups "${NODE_PREFIX}[0-9]*"
    rm -rf "$D/run" "$D/state" "$D/spool"
    mkdir -p "$D"/{etc,log,run,dev,mysql,state,spool}
    chmod 755 "$D" "$D"/{etc,log,run,dev,spool}
    # flock: other clusters may be starting, and useradd fails while /etc/passwd is locked
    [ -z "$TEST_USER" ] || id "$TEST_USER" >/dev/null 2>&1 ||
        flock "${LOCK%/*}/gpujob-useradd" useradd -m -s /bin/bash "$TEST_USER"
    configure
    start_host head
    in_host head ip link add br0 type bridge
    in_host head ip addr add "$NET.254/24" dev br0
    in_host head ip link set br0 up
    start_daemon head munged --force --num-threads=10 --key-file="$D/etc/munge.key" --socket="$D/run/munge.sock" \
        --pid-file="$D/run/munged.pid" --log-file="$D/log/munged.log" --seed-file="$D/etc/munge.seed"
    [ "$ACCOUNTING" != 1 ] || start_database
    start_daemon head slurmctld
    for i in $(seq "$NODES"); do
        h=$NODE_PREFIX$i
        mkdir -p "$D/spool/$h"
        start_host "$h"; connect "$h" "$i"; start_slurmd "$h"
    done
    wait_for 60 "all $NODES nodes to be idle" all_idle
    echo "$settings" >"$D/run/settings"
    trap - EXIT ERR
    status
}

# Keeps the logs and the configuration. Runs also as the last act of an `up` that failed.
down() {
    local pids p inits=() wait=0 rc=0
    mapfile -t pids < <(holders)
    # `unshare` is spared at first: it collects the init and then ends by itself, so no zombie stays.
    for p in "${pids[@]}"; do [ "$(cat "/proc/$p/comm" 2>/dev/null)" = unshare ] || inits+=("$p"); done
    [ ${#inits[@]} -eq 0 ] || kill -9 "${inits[@]}" 2>/dev/null || true
    if ! poll 5 gone "${pids[@]}"; then
        kill -9 "${pids[@]}" 2>/dev/null || true
        wait_for 30 "the cluster's processes to end" gone "${pids[@]}"
    fi
    # Only the holder of the lock may clear the control groups, for they may be another cluster's. A
    # failed `up` has it (descriptor 9); else it is free as soon as the last of our processes has gone.
    [ "$(cat "$LOCK" 2>/dev/null)" != "$D" ] || wait=10
    if { true >&9; } 2>/dev/null || lock $wait; then
        remove_cgroups "${NODE_PREFIX}[0-9]*" || rc=1
        exec 9>&-
    fi
    rm -rf "${D:?}"/{run,spool,state,dev}
    [ "${KEEP_DB:-0}" = 1 ] || rm -rf "${D:?}/mysql"
    return $rc
}

status() {
    alive head || { echo "down: $D"; return 1; }
    in_host head sinfo -N -p gpu -o '%N %t %c %m %G'
}

running() { # HOST
    if [ ! -d "$D/spool/$1" ] && [ "$1" != head ]; then die "no such node in $D: $1"; fi
    alive "$1" || die "not running: $1"
}

cmd=${1:-}; shift || true
case $cmd in
    up) up ;;
    down) [ "$(id -u)" = 0 ] || die "needs root"
        down ;;
    status) status ;;
    exec) running head
        enter head; exec "${inside[@]}" "$@" ;;
    on) node=${1:?on which node?}; shift
        running "$node"
        enter "$node"; exec "${inside[@]}" "$@" ;;
    stop-slurmd) node=${1:?of which node?}
        running "$node"
        [ -s "$D/run/slurmd.$node.pid" ] || die "slurmd of $node does not run"
        in_host "$node" kill -9 "$(pid_of "slurmd.$node")"
        rm -f "$D/run/slurmd.$node.pid" ;;
    kill-node) node=${1:?which node?}
        [ "$node" != head ] || die "the head cannot be killed; use down"
        running "$node"
        pid=$(pid_of "$node.init")
        kill -9 "$pid"
        wait_for 30 "the processes of $node to end" gone "$pid"
        rm -f "$D/run/$node.init.pid" "$D/run/slurmd.$node.pid"
        remove_cgroups "$node" ;;            # as a power cut would
    start-node) node=${1:?which node?}
        running head
        [ -d "$D/spool/$node" ] || die "no such node in $D: $node"
        if ! alive "$node"; then
            start_host "$node"; connect "$node" "${node##*[a-z]}"
        elif [ -s "$D/run/slurmd.$node.pid" ]; then
            echo "already running: $node"; exit 0
        fi
        start_slurmd "$node" ;;
    *) sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
