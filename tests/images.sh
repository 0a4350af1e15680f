#!/usr/bin/env bash
# Writes src/guide/images/NAME.md for each picture docs/images/NAME.svg or .png: the definition of the link
# [NAME] with the picture itself, because rustdoc copies no files. Run it after changing a picture.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for picture in docs/images/*.svg docs/images/*.png; do
    [ -f "$picture" ] || continue
    file="${picture##*/}"
    name="${file%.*}"
    case "$file" in
        *.svg) kind=image/svg+xml ;;
        *) kind=image/png ;;
    esac
    printf '[%s]: data:%s;base64,%s\n' "$name" "$kind" "$(base64 <"$picture" | tr -d '\n')" \
        >"src/guide/images/$name.md"
done
