#!/bin/bash
# Says which of recipes/*/*.patch and benchmarks/*.patch still apply to the code as it is, and why others do not; in
# brackets how many files a recipe changes, and how many lines it adds and removes there (not in model.py). Exits with
# how many do not apply.
#   tools/check_recipes.sh
#   tools/check_recipes.sh --write    # also writes those that apply anew, with the line numbers and lines of today
# To mend another: apply it with `git apply --reject`, make the rejected change by hand, and put `git diff -U1` below
# the lines that open the patch; new files count after `git add --intent-to-add`.
cd "$(dirname "$0")/.." || exit
copy=$(mktemp -d) failed=0
trap 'rm -rf "$copy"' EXIT
cp -R -- *.py runtime "$copy"
in_copy() { git -C "$copy" -c user.name=recipes -c user.email= "$@"; }
in_copy init --quiet && in_copy add --all && in_copy commit --quiet --message "the code as it is"

shopt -s nullglob # benchmarks/ may have been deleted
for recipe in recipes/*/*.patch benchmarks/*.patch; do
    if ! in_copy apply --index "$PWD/$recipe"; then
        echo "FAILS:   $recipe"
        failed=$((failed + 1))
        continue
    fi
    changed=$(in_copy diff --cached --numstat --diff-filter=M -- . ':!model.py' |
        awk '{ lines += $1 + $2 } END { print NR " files, " lines + 0 " lines" }')
    echo "applies: $recipe  ($changed)"
    if [[ $1 == --write ]]; then
        sed '/^diff --git/,$d' "$recipe" >"$copy/.git/recipe" # what stands above the diff
        in_copy diff --cached -U1 --no-color >>"$copy/.git/recipe"
        cp "$copy/.git/recipe" "$recipe"
    fi
    in_copy reset --quiet --hard
done
exit $failed
