#!/bin/sh
# Becomes systemd, the first process of a small machine: its own files in memory, this machine's
# /usr to be read, and an inferd as `pip install` leaves one. machine.py starts it in new namespaces,
# so nothing here is seen outside of them; but for its cgroup, which is named in the call.
#
# boot.sh GROUP CONSOLE NOTIFY PYTHON LIBRARIES INFERD
set -eu
group=$1 console=$2 notify=$3 python=$4 libraries=$5 inferd=$6
here=$(cd "$(dirname "$0")" && pwd)
version=$(cd "$python/bin" && ls -d python3.?? | head -n 1)

bound() { # bound FROM TO: FROM is to be read at TO, too
    mount --bind "$1" "$2"
    mount -o remount,bind,ro "$2"
}

mount --make-rprivate /
mount -t tmpfs -o mode=755 machine /mnt
cd /mnt
cp -r --no-preserve=mode,ownership "$here/root/." .
chmod 0600 etc/shadow etc/gshadow
mkdir -p dev etc/systemd/system home opt/python opt/libraries proc root run sys tmp usr var/lib var/log var/tmp
chmod 0700 root
chmod 1777 tmp var/tmp
for folder in bin lib lib64 sbin; do ln -s "usr/$folder" $folder; done
ln -s /run var/run

bound /usr usr
mount -t tmpfs -o mode=755 local usr/local
mkdir usr/local/bin
ln -s /opt/inferd/bin/inferd usr/local/bin
# Of this machine's units only those of units.txt are there.
mkdir run/units
while read -r unit; do cp "/usr/lib/systemd/system/$unit" run/units; done <"$here/units.txt"
mount -t tmpfs -o mode=755 units usr/lib/systemd/system
cp run/units/* usr/lib/systemd/system
for pair in sysinit.target/systemd-journald.service \
    sockets.target/systemd-journald-dev-log.socket; do
    mkdir "usr/lib/systemd/system/${pair%/*}.wants"
    ln -s "../${pair#*/}" "usr/lib/systemd/system/${pair%/*}.wants/"
done
ln -sf multi-user.target usr/lib/systemd/system/default.target
mount -t tmpfs -o mode=755 generators usr/lib/systemd/system-generators
rm -r run/units

mount -t proc -o nosuid,nodev,noexec proc proc
bound /proc/sys proc/sys
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs sys
mount -t tmpfs -o mode=755 dev dev
for node in full null random tty urandom zero; do
    touch dev/$node
    mount --bind /dev/$node dev/$node
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
touch dev/console
mount --bind "$console" dev/console
mount -t tmpfs -o mode=755 run run
mkdir run/host
mount --bind "$notify" run/host

# What `python3 -m venv /opt/inferd` and `pip install` make.
bound "$python" opt/python
bound "$libraries" opt/libraries
packages=opt/inferd/lib/$version/site-packages
mkdir -p $packages opt/inferd/bin
cp -rL --preserve=timestamps "$inferd" $packages/inferd
echo /opt/libraries >$packages/libraries.pth
printf 'home = /opt/python/bin\ninclude-system-site-packages = false\n' >opt/inferd/pyvenv.cfg
ln -s /opt/python/bin/"$version" opt/inferd/bin/python3
cat >opt/inferd/bin/inferd <<'END'
#!/opt/inferd/bin/python3
import sys
from inferd.cli import main
sys.exit(main())
END
chmod 0755 opt/inferd/bin/inferd
tr -d - </proc/sys/kernel/random/uuid >etc/machine-id
ldconfig -r .

echo 0 >"$group/cgroup.procs"
mkdir outside
pivot_root . outside
umount -l outside
rmdir outside
# Its cgroup is the root of what it sees of the hierarchy.
exec env -i container=inferd-tests NOTIFY_SOCKET=/run/host/notify PATH=/usr/local/bin:/usr/bin:/usr/sbin \
    unshare --cgroup sh -c \
    'mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec /usr/lib/systemd/systemd --show-status=no'
