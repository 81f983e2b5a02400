#!/usr/bin/env bash
# A small Ceph cluster on one machine, for the store: one monitor, one manager, three OSDs on three hosts of the map (each object
# on all three), two S3 gateways. Root; needs Debian's ceph-mon, ceph-mgr, ceph-osd, ceph-common, radosgw.
#
#   ceph.sh up DIR       makes the cluster below DIR, prints the gateways and the keys as `export` lines
#   ceph.sh kill DIR N   SIGKILL for OSD N (0 to 2);  ceph.sh start DIR N   starts it again
#   ceph.sh down DIR     ends every process
set -euo pipefail
command=${1:?up, kill, start or down} dir=${2:?a directory}
export CEPH_CONF=$dir/ceph.conf
osd() { ceph-osd -i "$1" --conf "$CEPH_CONF" -f >"$dir/osd.$1.log" 2>&1 & echo $! >"$dir/osd.$1.pid"; disown; }
case $command in
up)
    mkdir -p "$dir"/{mon,mgr}
    fsid=$(cat /proc/sys/kernel/random/uuid)
    cat >"$CEPH_CONF" <<C
[global]
fsid = $fsid
mon_host = [v2:127.0.0.1:3300/0,v1:127.0.0.1:6789/0]
public_network = 127.0.0.0/8
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
osd_pool_default_size = 3
osd_pool_default_min_size = 2
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
mon_max_pg_per_osd = 1000
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_memory_target = 939524096
osd_crush_chooseleaf_type = 1
osd_crush_update_on_start = false
run_dir = $dir
admin_socket = $dir/\$name.asok
log_file = $dir/\$name.ceph.log
mon_data = $dir/mon
mgr_data = $dir/mgr
osd_data = $dir/osd.\$id
keyring = $dir/keyring
osd_heartbeat_grace = 20
mon_data_avail_crit = 1
mon_osd_down_out_interval = 600
rgw_data = $dir/rgw
C
    ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *'
    ceph-authtool "$dir/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
    ceph-authtool "$dir/keyring" --gen-key -n mgr.x --cap mon 'allow profile mgr' --cap osd 'allow *'
    ceph-authtool "$dir/keyring" --gen-key -n client.rgw.a --cap mon 'allow rwx' --cap osd 'allow rwx'
    for n in 0 1 2; do
        ceph-authtool "$dir/keyring" --gen-key -n "osd.$n" --cap mon 'allow profile osd' --cap osd 'allow *' --cap mgr 'allow profile osd'
    done
    monmaptool --create --addv a '[v2:127.0.0.1:3300,v1:127.0.0.1:6789]' --fsid "$fsid" "$dir/monmap"
    ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring" --conf "$CEPH_CONF"
    ceph-mon -i a --conf "$CEPH_CONF" -f >"$dir/mon.log" 2>&1 & echo $! >"$dir/mon.pid"; disown
    ceph --connect-timeout 300 -s >/dev/null
    ceph-mgr -i x --conf "$CEPH_CONF" -f >"$dir/mgr.log" 2>&1 & echo $! >"$dir/mgr.pid"; disown
    ceph auth import -i "$dir/keyring" 2>/dev/null
    for n in 0 1 2; do
        uuid=$(cat /proc/sys/kernel/random/uuid)
        ceph osd new "$uuid" "$n" >/dev/null
        mkdir -p "$dir/osd.$n"
        ceph-osd -i "$n" --mkfs --osd-uuid "$uuid" --conf "$CEPH_CONF" >"$dir/mkfs.$n.log" 2>&1
        ceph osd crush add-bucket "node$n" host root=default >/dev/null 2>&1
        ceph osd crush add "osd.$n" 1.0 host="node$n" >/dev/null 2>&1
        osd "$n"
    done
    for port in 8001 8002; do
        radosgw -n client.rgw.a --conf "$CEPH_CONF" --rgw-frontends="beast port=$port" -f \
            --log-file "$dir/rgw.$port.log" >"$dir/rgw.$port.out" 2>&1 & echo $! >"$dir/rgw.$port.pid"; disown
        until curl -s -o /dev/null "http://127.0.0.1:$port"; do sleep 1; done
    done
    radosgw-admin user create --uid=windlass --display-name=windlass --access-key=windlass --secret-key=windlass-secret >/dev/null
    ceph -s
    echo "export AWS_ENDPOINT_URL=http://127.0.0.1:8001 AWS_ACCESS_KEY_ID=windlass AWS_SECRET_ACCESS_KEY=windlass-secret AWS_REGION=default"
    ;;
kill) kill -9 "$(cat "$dir/osd.$3.pid")" ;;
start) osd "$3" ;;
down) for pid in "$dir"/*.pid; do kill -9 "$(cat "$pid")" 2>/dev/null || true; done ;;
*) echo "ceph.sh: unknown command '$command'" >&2; exit 2 ;;
esac
