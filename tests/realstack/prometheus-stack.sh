#!/usr/bin/env bash
# Prometheus, Alertmanager and a webhook receiver on loopback, quick enough for tests.
#
#   prometheus-stack.sh up        start empty (data of an earlier run go); nothing to do when it runs
#   prometheus-stack.sh reload    read the rule files again
#   prometheus-stack.sh status    what answers where; exit 1 when something does not
#   prometheus-stack.sh down      end all three; safe at any time, also twice
#
# Environment:
#   STACK_DIR=/tmp/prometheus-stack   state and logs
#   PORT=19090            first of 3 ports: Prometheus, Alertmanager, receiver; 0: any three that are free.
#                         They are in $STACK_DIR/ports.json while the stack is up
#   RULES=<project>/alertmanager/rules/*.yml   globs of rule files, one per line; empty: none
#   TARGETS_DIR=$STACK_DIR/targets    what to scrape: file_sd, *.json
#   WHOLE=                when set, the stack scrapes itself too, and hides alerts as the shipped configuration does
#   HUB_TOKEN=            file with the token of a hub to scrape, at 127.0.0.1:9420
#   BIN=                  a folder with other versions of the programs
#   USER_ASSETS=          a folder that Prometheus serves below /user/
# Alerts arrive in $STACK_DIR/alerts.jsonl, one line per webhook call.
# For a cluster of slurm-cluster.sh run this on its head (slurm-cluster.sh exec), every command.
# Needs no root, and the programs that packages.sh installs.
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
D=$(realpath -m "${STACK_DIR:-/tmp/prometheus-stack}")
PORT=${PORT:-19090}
RULES=${RULES-$(cd "$HERE/../.." && pwd)/alertmanager/rules/*.yml}
TARGETS_DIR=$(realpath -m "${TARGETS_DIR:-$D/targets}")
PATH=${BIN:+$BIN:}$PATH:/usr/bin
PROGRAMS=(receiver alertmanager prometheus)
# Root's own Python may be out of reach for others; Debian's is not.
PYTHON=/usr/bin/python3; [ -x $PYTHON ] || PYTHON=python3

die() { echo "prometheus-stack: $*" >&2; exit 1; }
json() { "$PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$1"; }     # a string, also for YAML

# --- processes: pid and start time, since a pid alone may be a stranger's by now ---

started_at() { # PID: empty when it has ended or is a zombie
    local stat
    stat=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 0
    # shellcheck disable=SC2086
    set -- $stat
    case $1 in Z|X) ;; *) echo "${20}" ;; esac
}
pid_of() { # NAME: empty when it does not run
    local pid when
    read -r pid when 2>/dev/null <"$D/$1.pid" || return 0
    [ -z "$when" ] || [ "$(started_at "$pid")" != "$when" ] || echo "$pid"
}
start() { # NAME CMD...
    local name=$1; shift
    setsid "$@" </dev/null >"$D/$name.log" 2>&1 &
    disown
    echo "$! $(started_at $!)" >"$D/$name.pid"
}
ended() { [ -z "$(pid_of "$1")" ]; }
wait_end() { # SECONDS NAME
    local end=$((SECONDS + $1))
    until ended "$2"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}

url() { # NAME
    local ports
    ports=$(cat "$D/ports.json" 2>/dev/null) || return 0
    [[ $ports =~ \"$1\":\ ([0-9]+) ]] && echo "http://127.0.0.1:${BASH_REMATCH[1]}"
}
ready_path() { [ "$1" = receiver ] && echo / || echo /-/ready; }
answers() { curl -fsS -m 5 -o /dev/null "$(url "$1")$(ready_path "$1")" 2>/dev/null; }
wait_ready() { # NAME
    local end=$((SECONDS + 60))
    until answers "$1"; do
        ! ended "$1" || die "$1 ended at its start (log: $D/$1.log): $(tail -n 3 "$D/$1.log")"
        [ $SECONDS -lt $end ] || die "timed out waiting for $1 at $(url "$1") (log: $D/$1.log)"
        sleep 0.05
    done
}

# --- configuration ---

configure() {
    local ports rule files found=0 rule_files= scrape wanted
    ports=$("$PYTHON" - "$PORT" <<'PY'
import json, random, socket, sys

first = int(sys.argv[1])
sockets = [socket.socket() for _ in range(3)]
for i, s in enumerate(sockets):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:  # those that the kernel gives may be taken until the program starts
            s.bind(("127.0.0.1", first + i if first else random.randrange(21000, 32000)))
            break
        except OSError as error:
            if first:
                sys.exit(f"port {first + i}: {error.strerror}")
print(json.dumps(dict(zip(("prometheus", "alertmanager", "receiver"), (s.getsockname()[1] for s in sockets)))))
PY
    ) || die "no ports (PORT=$PORT)"
    echo "$ports" >"$D/ports.json"
    while read -r rule; do
        [ -n "$rule" ] || continue
        mapfile -t files < <(compgen -G "$rule" || true)
        [ ${#files[@]} -gt 0 ] || echo "prometheus-stack: no rule file matches $rule" >&2
        found=$((found + ${#files[@]}))
        rule_files+="${rule_files:+, }$(json "$(realpath -ms "$rule")")"
    done <<<"$RULES"
    # Scraped as docker/prometheus.yml says, but every second.
    wanted='"/targets/*.json"'
    scrape=$(sed -n '/^  - job_name: gpujob-sidecar/,/^$/{s/: 1[05]s/: 1s/;p}' "$HERE/../../docker/prometheus.yml")
    scrape=${scrape/"$wanted"/"$(json "$TARGETS_DIR/*.json")"}
    cat >"$D/prometheus.yml" <<CONF
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [$rule_files]
alerting: {alertmanagers: [{static_configs: [{targets: ["127.0.0.1:$(port alertmanager)"]}]}]}
scrape_configs:
$scrape
CONF
    [ -z "${HUB_TOKEN:-}" ] || cat >>"$D/prometheus.yml" <<CONF
  - job_name: gpujob-hub
    authorization: {credentials_file: $(json "$HUB_TOKEN")}
    static_configs: [{targets: ["127.0.0.1:9420"]}]
CONF
    if [ -n "${WHOLE:-}" ]; then
        echo "  - {job_name: prometheus, static_configs: [{targets: [\"127.0.0.1:$(port prometheus)\"]}]}" >>"$D/prometheus.yml"
    fi
    # As shipped, what may be hidden waits for two evaluations: the rules that hide it may have their turn later.
    cat >"$D/alertmanager.yml" <<CONF
route: {receiver: test, group_by: [cluster, job_id, user], group_wait: $([ -n "${WHOLE:-}" ] && echo 3 || echo 1)s, group_interval: 2s, repeat_interval: 1h}
receivers:
  - name: test
    webhook_configs: [{url: "http://127.0.0.1:$(port receiver)/", send_resolved: true}]
CONF
    [ -z "${WHOLE:-}" ] || sed -n '/^inhibit_rules:/,/^receivers:/{/^receivers:/d;p}' \
        "$HERE/../../alertmanager/alertmanager.yml" >>"$D/alertmanager.yml"
    echo "rule files: $found"
    promtool check config "$D/prometheus.yml" >"$D/check.log" 2>&1 || { cat "$D/check.log" >&2; die "bad rules or configuration"; }
    amtool check-config "$D/alertmanager.yml" >"$D/check.log" 2>&1 || { cat "$D/check.log" >&2; die "bad alertmanager.yml"; }
}
port() { local u; u=$(url "$1"); echo "${u##*:}"; }

# --- commands ---

up() {
    local p missing=() running=0
    for p in prometheus prometheus-alertmanager promtool amtool curl "$PYTHON"; do
        command -v "$p" >/dev/null || missing+=("$p")
    done
    [ ${#missing[@]} -eq 0 ] || die "not installed: ${missing[*]} (run $HERE/packages.sh)"
    check_where
    for p in "${PROGRAMS[@]}"; do ended "$p" || running=$((running + 1)); done
    if [ $running = ${#PROGRAMS[@]} ]; then
        echo "already up: $D"; status; return
    fi
    trap 'rc=$?; trap - EXIT; down; exit $rc' EXIT
    [ $running = 0 ] || down
    rm -rf "$D"/{data,am-data,alerts.jsonl}
    mkdir -p "$D"
    # Anyone may announce targets there, and nobody can remove another's: as a site would have it.
    [ -d "$TARGETS_DIR" ] || { mkdir -p "$TARGETS_DIR"; chmod 1777 "$TARGETS_DIR"; }
    readlink /proc/self/ns/pid >"$D/where"
    configure
    start receiver "$PYTHON" "$HERE/alert_receiver.py" "$(port receiver)" "$D/alerts.jsonl"
    start alertmanager prometheus-alertmanager --config.file="$D/alertmanager.yml" \
        --storage.path="$D/am-data" --web.listen-address="127.0.0.1:$(port alertmanager)" --cluster.listen-address=
    # A change of targets is acted upon within a second instead of five (a hidden flag).
    start prometheus prometheus --config.file="$D/prometheus.yml" --storage.tsdb.path="$D/data" \
        --web.listen-address="127.0.0.1:$(port prometheus)" --web.enable-lifecycle --scrape.discovery-reload-interval=1s \
        ${USER_ASSETS:+--web.user-assets="$USER_ASSETS"}
    for p in "${PROGRAMS[@]}"; do wait_ready "$p"; done
    trap - EXIT
    status
}

# Pids mean something only in the PID namespace where they were written down.
check_where() {
    local there all
    there=$(cat "$D/where" 2>/dev/null) || return 0
    [ "$there" != "$(readlink /proc/self/ns/pid)" ] || return 0
    all=$(readlink /proc/[0-9]*/ns/pid 2>/dev/null || true)      # those of other users cannot be read
    if grep -qxF "$there" <<<"$all"; then
        die "$D belongs to a stack on another host: run this there (slurm-cluster.sh exec $0 ...)"
    fi
    rm -f "$D"/{where,*.pid,ports.json}     # that host is gone, and the programs with it
}

down() {
    local p pid
    check_where
    for p in "${PROGRAMS[@]}"; do
        pid=$(pid_of "$p")
        [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    done
    for p in "${PROGRAMS[@]}"; do
        if ! wait_end 5 "$p"; then
            echo "prometheus-stack: $p did not end within 5 s of SIGTERM, killing it" >&2
            kill -9 "$(pid_of "$p")" 2>/dev/null || true
            wait_end 10 "$p" || die "$p cannot be killed"
        fi
        rm -f "$D/$p.pid"
    done
    rm -f "$D"/{where,ports.json}
}

status() {
    local p rc=0
    check_where
    for p in prometheus alertmanager receiver; do
        if ended "$p"; then echo "$p: down"; rc=1
        elif answers "$p"; then echo "$p: $(url "$p")"
        else echo "$p: does not answer at $(url "$p") (log: $D/$p.log)"; rc=1; fi
    done
    return $rc
}

case ${1:-} in
    up) up ;;
    reload) ! ended prometheus || die "not up: $D"
        curl -sS -m 30 --fail-with-body -X POST "$(url prometheus)/-/reload" ;;
    status) status ;;
    down) down ;;
    *) sed -n '2,/^set -euo/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
