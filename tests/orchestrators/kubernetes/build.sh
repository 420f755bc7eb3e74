#!/bin/sh
# Builds a Kubernetes control plane from Debian's source package, once: kube-apiserver, kube-controller-manager and
# kube-scheduler.
#
#     sh build.sh FOLDER
#
# FOLDER/bin holds them afterwards; what is there already is left alone. It takes 10 to 30 minutes on two cores, 6 GB
# of disk while it runs, and root where Go or etcd is missing. Debian 12 has version 1.20.2.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
programs="kube-apiserver kube-controller-manager kube-scheduler"
suite=bookworm

complete=yes
for program in $programs; do
    [ -x "$folder/bin/$program" ] || complete=no
done
if [ "$complete" = no ] || ! command -v etcd > /dev/null; then
    missing=
    [ "$complete" = yes ] || command -v go > /dev/null || missing="$missing golang-go"
    [ "$complete" = yes ] || command -v rsync > /dev/null || missing="$missing rsync"
    command -v etcd > /dev/null || missing="$missing etcd-server"
    command -v dpkg-source > /dev/null || missing="$missing dpkg-dev"
    # shellcheck disable=SC2086  # one word a package
    [ -z "$missing" ] || RUNLEVEL=1 apt-get install --yes --no-install-recommends $missing
fi
[ "$complete" = no ] || exit 0

# The sources' lists are this folder's own, from where the system has its packages: its own lists stay as they are.
mkdir -p "$folder/lists/partial" "$folder/bin"
# shellcheck disable=SC2016  # apt's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' "Created-By: Packages" "Component: main" "Codename: $suite" | head -n 1)
[ -n "$mirror" ] || { echo "no packages of Debian's $suite are known here: add its main section to apt's sources and run apt-get update" >&2; exit 1; }
echo "deb-src $mirror $suite main" > "$folder/sources.list"
cd "$folder"
set -- -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=- \
    -o "Dir::State::Lists=$folder/lists" -o APT::Sandbox::User=root
apt-get "$@" update
[ -d source ] || {
    apt-get "$@" source --download-only kubernetes
    rm -rf source.new
    dpkg-source --extract kubernetes_*.dsc source.new
    mv source.new source
}

cat > "$folder/version" << 'END'
KUBE_GIT_COMMIT='debian'
KUBE_GIT_TREE_STATE='archive'
KUBE_GIT_VERSION='v1.20.2'
KUBE_GIT_MAJOR='1'
KUBE_GIT_MINOR='20'
END
cd source
export KUBE_GIT_VERSION_FILE="$folder/version" GOPROXY=off GOCACHE="$folder/cache" GOPATH="$folder/go" GOTOOLCHAIN=local
for program in $programs; do
    nice -n 19 make WHAT="cmd/$program" KUBE_VERBOSE=1
    cp "_output/local/go/bin/$program" "$folder/bin/$program.new"
    mv "$folder/bin/$program.new" "$folder/bin/$program"
done
# What it was made of is ten times as large.
cd "$folder"
rm -rf source cache go lists kubernetes_*
