#!/usr/bin/env bash
# An emulated cluster on one machine: a shard host and workers, each in a network namespace.
#
#   netns.sh up [RATE...]             make the cluster, one worker for each RATE
#                                     [4 x 1gbit, 4 x 0.1gbit; shard link: $SHARD_RATE or 2gbit]
#   netns.sh rate NODE RATE           change a link in both directions, also while it carries data
#   netns.sh loss NODE PERCENT        drop random packets in both directions; 0 ends the loss
#   netns.sh link NODE up|down        plug in or pull the cable at the switch
#   netns.sh exec NODE COMMAND...     run a command in the namespace of a node
#   netns.sh bytes NODE               bytes that a node has received and sent
#   netns.sh status                   addresses and queues of every namespace
#   netns.sh down                     remove the cluster
#
# Nodes are called shard, w0, w1, ... Their addresses are 10.77.0.1 (shard) and 10.77.0.10 + i.
# Each node has one device, eth0: set GLOO_SOCKET_IFNAME=eth0. A bridge in a namespace of its own
# joins them, and HTB shapes both ends of each link. $PREFIX [er-] tells clusters apart.
#
# Needs root, iproute2 (ip, tc), and nftables for packet loss. Two cores carry about 4 x 1 Gbit/s
# and 4 x 0.1 Gbit/s with most of the processor time left for training. At 5 and 0.5 Gbit/s the
# processor is the limit, not the link: make rows smaller instead of links faster.
set -e
PREFIX=${PREFIX:-er-}
SWITCH=${PREFIX}sw
NETWORK=10.77.0
DEFAULT_RATES=(1gbit 1gbit 1gbit 1gbit 0.1gbit 0.1gbit 0.1gbit 0.1gbit)

within() { ip netns exec "$@"; }  # NAMESPACE COMMAND...

namespaces() { ip netns list | awk '{print $1}' | grep "^$PREFIX" || true; }

mbit() {  # RATE, such as 0.1gbit: as a number of Mbit/s
    awk -v rate="$1" 'BEGIN {
        rate = tolower(rate); scale = 1e-6
        if (rate ~ /g/) scale = 1000
        else if (rate ~ /m/) scale = 1
        else if (rate ~ /k/) scale = 0.001
        print (rate + 0) * scale
    }'
}

shape() {  # NAMESPACE DEVICE RATE
    local rate burst
    rate=$(mbit "$3")
    # Tokens of 50 us: 16 to 64 KB. A larger bucket would let a single message pass unshaped.
    burst=$(awk -v kb="$rate" 'BEGIN {
        kb *= 0.00625; if (kb < 16) kb = 16; if (kb > 64) kb = 64
        print int(kb)
    }')
    within "$1" tc qdisc show dev "$2" root | grep -q "htb 1:" ||
        within "$1" tc qdisc add dev "$2" root handle 1: htb default 1
    within "$1" tc class replace dev "$2" parent 1: classid 1:1 htb \
        rate "${rate}mbit" burst "${burst}kb" cburst "${burst}kb" quantum 60000
}

shape_link() {  # NODE RATE
    shape "$PREFIX$1" eth0 "$2"
    shape "$SWITCH" "v-$1" "$2"
}

add_node() {  # NODE ADDRESS RATE
    local space=$PREFIX$1
    ip netns add "$space"
    ip link add name "v-$1" netns "$SWITCH" type veth peer name eth0 netns "$space"
    ip -n "$SWITCH" link set "v-$1" master br0 up
    ip -n "$space" addr add "$2/24" dev eth0
    ip -n "$space" link set eth0 up
    ip -n "$space" link set lo up
    within "$space" sysctl -qw net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_no_metrics_save=1
    within "$space" sysctl -qw net.ipv4.tcp_congestion_control=bbr 2>/dev/null || true
    shape_link "$1" "$3"
}

up() {  # RATE...
    local i rates=("$@")
    [ ${#rates[@]} -gt 0 ] || rates=("${DEFAULT_RATES[@]}")
    ip netns add "$SWITCH"
    ip -n "$SWITCH" link add br0 type bridge
    ip -n "$SWITCH" link set br0 up
    ip -n "$SWITCH" link set lo up
    add_node shard $NETWORK.1 "${SHARD_RATE:-2gbit}"
    for i in "${!rates[@]}"; do
        add_node "w$i" "$NETWORK.$((10 + i))" "${rates[$i]}"
    done
}

down() {
    local space pids
    for space in $(namespaces); do
        pids=$(ip netns pids "$space")
        [ -z "$pids" ] || echo "note: processes still in $space: $pids" >&2
        ip netns del "$space"
    done
}

drop_packets() {  # NAMESPACE DEVICE NODE PARTS_IN_10000
    within "$1" nft delete table netdev "er_$3" 2>/dev/null || true
    [ "$4" = 0 ] || within "$1" nft "table netdev er_$3 { chain drops {
        type filter hook ingress device $2 priority 0; numgen random mod 10000 < $4 drop; }; }"
}

loss() {  # NODE PERCENT
    local parts
    parts=$(awk "BEGIN { print int($2 * 100) }")
    drop_packets "$SWITCH" "v-$1" "$1" "$parts"
    drop_packets "$PREFIX$1" eth0 "$1" "$parts"
}

status() {
    local space
    for space in $(namespaces); do
        echo "== $space"
        ip -n "$space" -br addr
        within "$space" tc -s qdisc show | grep -v noqueue
    done
}

bytes() {  # NODE
    within "$PREFIX$1" cat /sys/class/net/eth0/statistics/{rx,tx}_bytes | paste -sd' '
}

command=$1
shift || true
case $command in
    up | down | loss | status | bytes) "$command" "$@" ;;
    rate) shape_link "$@" ;;
    link) ip -n "$SWITCH" link set "v-$1" "$2" ;;
    exec) node=$1; shift; exec ip netns exec "$PREFIX$node" "$@" ;;
    *) sed -n '2,/^set -e/{/^#/p}' "$0" ;;
esac
