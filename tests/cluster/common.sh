# shellcheck shell=bash
# shellcheck disable=SC2034
# What the scripts beside this one share. Sourced.
#
# A cluster is what runs below one state directory: certificates, logs, the audit log, the kubeconfig, a process in each file of
# run/, a directory for each node. Programs are found by PATH, which `./dev` completes and `up` writes down for the other scripts.
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
dir=${HARMONIA_CI_CLUSTER_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/harmonia-ci/cluster}
[[ ! -f $dir/path ]] || PATH=$(<"$dir/path")
export KUBECONFIG=$dir/kubeconfig KUBECACHEDIR=$dir/cache

# Machines and Services of a cluster with nodes. There is one such cluster at a time on a machine.
bridge=hci0
gateway=10.213.0.1
services=10.96.0.0/16
dns=10.96.0.10
node_address() { echo "10.213.0.$((10 + ${1#node}))"; }
node_pods() { echo "10.244.${1#node}.0/24"; }

fail() {
    echo "cluster: $*" >&2
    exit 1
}

# The address of this cluster's own ports, and of its API if it has no nodes: any number of them run side by side.
loopback() {
    local sum
    sum=$(cksum <<<"$dir")
    sum=${sum%% *}
    echo "127.$((sum % 253 + 1)).$((sum / 253 % 256)).1"
}

# --- processes, each in a file run/NAME.pid with its id and when it started: ids are used again

started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut --delimiter ' ' --fields 20; }

# keep_pid NAME PID
keep_pid() { echo "$2 $(started "$2")" >"$dir/run/$1.pid"; }

# start NAME COMMAND…: in a session of its own, so that an interrupt at the terminal is not for it.
start() {
    local name=$1
    shift
    setsid "$@" >"$dir/log/$name.log" 2>&1 </dev/null &
    keep_pid "$name" $!
    disown
}

# pid_of NAME: fails if the process is gone or only waits for its parent to notice that it has ended.
pid_of() {
    local pid since
    read -r pid since 2>/dev/null <"$dir/run/$1.pid" && [[ $(started "$pid") == "$since" ]] &&
        grep --quiet '^State:[[:space:]]*[^ZX]' "/proc/$pid/status" 2>/dev/null && echo "$pid"
}

# end NAME…: without notice. An API server whose etcd is gone does not end on SIGTERM, and what they hold is thrown away.
end() {
    local name pid
    for name; do
        if pid=$(pid_of "$name"); then kill -KILL "$pid"; fi
    done
    for name; do
        while pid_of "$name" >/dev/null; do sleep 0.02; done
        rm -f "$dir/run/$name.pid"
    done
}

# runs: whether any part of this cluster does. None does if the machine was restarted, or if only the directory came along.
runs() {
    local name
    for name in etcd kube-apiserver kube-controller-manager kube-scheduler coredns $(nodes); do
        if pid_of "$name" >/dev/null; then return; fi
    done
    return 1
}

# What should take a moment may take so many seconds: the machine may be busy.
patience=180

# await WHAT COMMAND…: until the command succeeds.
await() {
    local deadline=$((SECONDS + patience)) what=$1
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || fail "$what: not in time"
        sleep 0.1
    done
}

# --- nodes

nodes() { local file; for file in "$dir"/nodes/*/; do [[ -d $file ]] && basename "$file"; done; }

node_known() { [[ $1 == node[1-9] && -d $dir/nodes/$1 ]] || fail "there is no node $1; there are: $(nodes | paste --serial --delimiters ' ')"; }

# node_init NAME: the node's first process, as this machine numbers it.
node_init() {
    local pid init
    pid=$(pid_of "$1") && [[ $(<"/proc/$pid/comm") == unshare ]] && read -r init _ <<<"$(<"/proc/$pid/task/$pid/children")" &&
        [[ $init ]] && echo "$init"
}

# in_node NAME COMMAND…
in_node() {
    local init
    init=$(node_init "$1") || fail "$1 is off"
    nsenter --target "$init" --mount --pid --net -- "${@:2}"
}

# This machine reaches Services through kube-proxy of a node that is on.
route_services() {
    local name
    for name in $(nodes); do
        if pid_of "$name" >/dev/null; then
            ip route replace "$services" via "$(node_address "$name")"
            return
        fi
    done
    ip route del "$services" 2>/dev/null || true
}
