#!/usr/bin/env bash
# Unpacks packages of Debian into a folder: `debian_packages.sh SUITE ARCHITECTURE FOLDER PACKAGE... [-- PACKAGE...]`.
# Those before `--` come with all that they depend on, those after it alone; each may be NAME:ARCHITECTURE. Nothing is installed, no
# maintainer script runs, and no rights are needed: apt keeps its lists in FOLDER.apt. Packages come from where this machine's
# apt has Debian's, or from MIRROR=URL. KEYRING=FILE says whose signatures count.
set -euo pipefail
export LC_ALL=C

fail() {
    echo "*** $*" >&2
    exit 2
}

for tool in apt-get dpkg-deb; do
    command -v $tool >/dev/null || fail "there is no $tool; this needs Debian or one of its derivatives"
done
suite=$1 architecture=$2 folder=$3
shift 3
mirror=${MIRROR:-$(apt-get indextargets 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' --format '$(REPO_URI)' |
    sed -n 1p)}
[ -n "$mirror" ] || fail "this machine's apt has no Debian: name a mirror, as in MIRROR=URL"
keyring=${KEYRING:-/usr/share/keyrings/debian-archive-keyring.gpg}
[ -r "$keyring" ] || fail "there is no $keyring (apt-get install debian-archive-keyring)"

apt=$(realpath -m "$folder.apt")
rm -rf "$folder" "$apt"
mkdir -p "$folder" "$apt"/{state/lists/partial,cache/archives/partial}
touch "$apt/state/status"
echo "deb [signed-by=$(realpath "$keyring")] $mirror $suite main" >"$apt/sources"
cat >"$apt/conf" <<CONF
Dir::Etc::SourceList "$apt/sources";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "$apt/state";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt/cache";
APT::Architecture "$architecture";
APT::Architectures { "$architecture"; "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Retries "3";
CONF
export APT_CONFIG=$apt/conf

with=() alone=()
for package; do
    case $package in
    --) seen=1 ;;
    *) if [ -n "${seen:-}" ]; then alone+=("$package"); else with+=("$package"); fi ;;
    esac
done
apt-get -qq update
apt-get -qq --yes --download-only install "${with[@]}" >/dev/null
[ ${#alone[@]} = 0 ] || (cd "$apt/cache/archives" && apt-get -qq download "${alone[@]}" >/dev/null)
# Debian's folders under /usr have links at the root, which a package's script would make.
for dir in bin sbin lib lib64; do
    mkdir -p "$folder/usr/$dir"
    ln -s usr/$dir "$folder/$dir"
done
for file in "$apt"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$file" |
        tar --extract --directory "$folder" --no-same-owner --keep-directory-symlink
done
rm -rf "$apt"
