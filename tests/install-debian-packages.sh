#!/bin/sh
# Install the Debian packages that some tests need, where this may be done; otherwise name what will be skipped.
set -u
list=$1
missing=""
while IFS="$(printf '\t')" read -r package skipped; do
	case $package in '' | '#'*) continue ;; esac
	dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q ' installed$' || missing="$missing $package"
done <"$list"
[ -z "$missing" ] && exit 0

sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo -n"
if command -v apt-get >/dev/null && { [ -z "$sudo" ] || $sudo true 2>/dev/null; }; then
	$sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null && exit 0
fi
for package in $missing; do
	echo "not installed: $package; skipped: $(grep "^$package" "$list" | cut -f2)"
done
exit 0
