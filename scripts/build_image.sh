#!/bin/sh
# Build the container image with the first of docker, podman and buildah that works here.
# build_image.sh cuda|cpu TAG
set -eu
kind=$1 tag=$2 file=config/docker/Dockerfile.$1
[ -f "$file" ] || { echo "make image: KIND is cuda or cpu, not $kind" >&2; exit 2; }
if docker info >/dev/null 2>&1; then
    set -- docker build
elif command -v podman >/dev/null; then
    set -- podman build --format docker  # the other format has no HEALTHCHECK
elif command -v buildah >/dev/null; then
    set -- buildah bud --format docker
else
    echo "make image: neither a running docker nor podman nor buildah is here" >&2
    exit 1
fi
echo "$* -f $file -t $tag ."
"$@" -f "$file" -t "$tag" .
echo "Try: docker run -p 8080:8080 $tag serve --demo --host 0.0.0.0"
