#!/bin/sh
# Installs tunerd, takes it away again, or tries it out. Downloads Python packages, no model weights.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
dest=${DESTDIR:-}
prefix=/opt/tunerd
lib=/usr/local/lib
embedded=embedded fleet=''
mode='' uninstall=no dry=no try_dir='' prepared='' measured=''

usage() {
    cat <<EOF
usage: install.sh [--system | --user] [--uninstall] [--dry-run]
                  [--without-embedded] [--with-fleet]
       install.sh --try [FOLDER]
       install.sh --python

  --system     install into $prefix for the whole machine; the default for root
  --user       install into your home, for units of your own
  --try        show the main job in a folder of its own (.try), where everything stays
  --uninstall  remove tunerd; the server keeps serving, backups and history stay
  --dry-run    say what would be done, and do nothing
  --without-embedded  leave out the engine that comes as a Python package
  --with-fleet        also install what a shared PostgreSQL needs; upgrades keep it
  --python     print the Python that would be used

Root gets the Debian packages python3-venv and libgomp1 installed where they are missing.
With DESTDIR set, --system only writes the files, below that folder.
EOF
}

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }

# A sentence, and what to do about it.
die() {
    warn "error: $1"
    if [ -n "${2:-}" ]; then
        warn ''
        warn "hint: $2"
    fi
    exit 1
}

# Does it, or says that it would be done.
act() {
    if [ "$dry" = yes ]; then
        say "would run: $*"
    else
        "$@"
    fi
}

# Says the last word; false if there was nothing done that more could be said of.
done_with() {
    say ''
    if [ "$dry" = yes ]; then
        say 'nothing was done'
        return 1
    fi
    say "$1"
}

# What became of the server; a sweep that was ended says so itself only to who began it.
untouched() {
    if [ -z "$measured" ]; then
        say 'What serves now was not touched.'
    else
        say 'A measurement was ended for it, and your server started again in its place.'
        say '  a sweep    goes on with: tunerd sweep resume; one of a night does so in the next night'
    fi
}

systemd_runs() { [ -z "$dest" ] && [ -d /run/systemd/system ]; }

# --- Python and the environment ---

# Path of the first Python that can do $1. A service cannot use one that lies in somebody's home.
# Every Python here is asked with -I: without it a file of the folder that this is called in, which
# may be anybody's, is taken for a module.
look_for_python() {
    if [ "$mode" = system ]; then
        candidates='/usr/bin/python3 /usr/local/bin/python3'
    else
        candidates='python3 python3.15 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3'
    fi
    for candidate in $candidates; do
        path=$(command -v "$candidate") || continue
        "$path" -Ic "import sys; assert sys.version_info >= (3, 11); $1" 2>/dev/null || continue
        say "$path"
        return 0
    done
    return 1
}

# Installs a Debian package as root; false where that cannot be.
get_packages() {
    if [ "$(id -u)" != 0 ] || [ "$dry" = yes ] || ! command -v apt-get >/dev/null; then
        return 1
    fi
    warn "$1 is missing, running: $get $2"
    apt-get --quiet=2 update >&2 || true
    DEBIAN_FRONTEND=noninteractive $get --quiet=2 "$2" >&2
}

find_python() {
    get='apt-get install --yes --no-install-recommends'
    if ! look_for_python 'import ensurepip, venv' >/dev/null; then
        get_packages "Python's venv module" python3-venv || true
    fi
    if ! look_for_python 'import ensurepip, venv'; then
        look_for_python 'pass' >/dev/null ||
            die 'there is no Python 3.11 or newer' "sudo $get python3-venv"
        die "Python's venv module is missing" "sudo $get python3-venv"
    fi
}

# The embedded engine is linked to the OpenMP library of the system, the one thing that its Python
# package does not bring. Without it all else works.
find_library() {
    has_library='import ctypes; ctypes.CDLL("libgomp.so.1")'
    if [ -z "$embedded" ] || "$1" -Ic "$has_library" 2>/dev/null; then
        return
    fi
    get='apt-get install --yes --no-install-recommends'
    if ! get_packages 'libgomp.so.1, which the embedded engine needs,' libgomp1; then
        [ "$mode" != try ] || die 'libgomp.so.1 is missing' "sudo $get libgomp1"
        warn "the embedded engine will not start until you run: sudo $get libgomp1"
    fi
}

# What holds of an environment in which pip can put a version in the place of another.
is_whole='import pip, importlib.metadata; assert importlib.metadata.files("tunerd")'

# Makes environment $1, or a newer copy of it, beside it: nothing that is there is touched before
# `put_environment`, whatever ends this.
prepare_environment() {
    for found in "$1"/lib/python*/site-packages/psycopg; do
        [ ! -e "$found" ] || fleet=fleet
    done
    extra=$embedded${embedded:+${fleet:+,}}$fleet
    extra=${extra:+[$extra]}
    if [ "$dry" = yes ]; then
        say "would install tunerd$extra and its packages into $1"
        return
    fi
    python=$(find_python)
    find_library "$python"
    unset PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
    mkdir -p -- "$(dirname -- "$1")"
    (umask 077 && : >>"$1.lock") # who can read a file can hold a lock on it
    exec 7<"$1.lock"
    wait_for_lock 7 'another installation is under way'
    prepared=$1.new
    trap undo EXIT
    trap 'exit 130' HUP INT PIPE TERM
    rm -rf -- "$prepared"
    put_back "$1"
    if "$1/bin/python" -Ic "$is_whole" 2>/dev/null; then
        problem=$(cp -a -- "$1/." "$prepared" 2>&1) ||
            die "could not copy $1: $(printf '%s\n' "$problem" | head -n 1)" 'nothing was replaced'
        rm -f -- "$prepared/source.sha256" # what Ansible installed; it writes that anew
    else
        "$python" -Im venv --prompt tunerd "$prepared" # new, or its Python was replaced by an upgrade
    fi
    say 'installing Python packages ...'
    "$prepared/bin/python" -Im pip install --quiet "$here$extra" ||
        die 'pip could not install the packages; its reason is above' 'nothing was replaced; try again'
    for shell in bash zsh fish; do
        file=$prepared/share/$(completion_of $shell)
        mkdir -p -- "$(dirname -- "$file")"
        "$prepared/bin/python" -Im tunerd completion $shell >"$file"
    done
    mkdir -p -- "$prepared/share/tunerd"
    cp -- "$here/install.sh" "$prepared/share/tunerd" # it uninstalls, when these sources are gone too
    relocate "$prepared" "${1#"$dest"}"
    sync --file-system -- "$prepared"
}

# Puts what was prepared in the place of environment $1. No signal ends this between the two moves; where
# the second fails, `undo` takes back the first.
put_environment() {
    [ "$dry" = no ] || return 0
    rm -rf -- "$1.old"
    trap '' HUP INT PIPE TERM
    [ ! -e "$1" ] || mv -T -- "$1" "$1.old"
    move "$prepared" "$1" ||
        die "could not move the new $1 into its place; mv's reason is above" 'nothing was replaced; try again'
    trap 'exit 130' HUP INT PIPE TERM
    rm -rf -- "$1.old" || true
}

# Moves environment $1 to $2, where at most folders are in the way: a Python that is about to end makes its own
# anew, for the bytecode of what it has just read, even while they are removed.
move() {
    for _ in 1 2 3; do
        rm -rf -- "$2" || true
        ! mv -T -- "$1" "$2" || return 0
    done
    return 1
}

# Moves what was in the place of environment $1 back, where no other came there.
put_back() {
    [ -e "$1/pyvenv.cfg" ] || [ ! -e "$1.old" ] || move "$1.old" "$1"
}

# What an installation that ends early does last.
undo() {
    trap '' HUP INT PIPE TERM
    if [ -n "$prepared" ]; then
        put_back "${prepared%.new}" || true
        rm -rf -- "$prepared" || true
    fi
}

# Lets programs of environment $1 find their Python where they will be, below $2.
relocate() {
    from=$(printf '%s\n' "$1" | sed 's/[].*^$|\\[]/\\&/g') to=$(printf '%s\n' "$2" | sed 's/[\\|&]/\\&/g')
    grep -rlIF -- "$1" "$1/bin" "$1/pyvenv.cfg" |
        while IFS= read -r file; do
            sed "s|$from|$to|g" <"$file" >"$file.new"
            chmod --reference="$file" -- "$file.new"
            mv -f -- "$file.new" "$file"
        done
}

# Where shell $1 looks for completions, below a folder for shared data.
completion_of() {
    case $1 in
    bash) say bash-completion/completions/tunerd ;;
    zsh) say zsh/site-functions/_tunerd ;;
    fish) say fish/vendor_completions.d/tunerd.fish ;;
    esac
}

# Calls $1, which is `link` or `unlink_ours`, for what of environment $2 is looked for in the folders
# $3 (programs) and $4 (shared data), but for its server, which units may need.
each_link() {
    "$1" "$2/bin/tunerd" "$3/tunerd"
    for file in man/man1/tunerd.1 $(completion_of bash) $(completion_of zsh) $(completion_of fish); do
        "$1" "$2/share/$file" "$4/$file"
    done
}

# --- files ---

# Installs file $1 as $2, readable by all, unless it stands there already.
put() {
    if [ -e "$2" ] && cmp -s -- "$1" "$2"; then
        return
    fi
    if [ "$dry" = yes ]; then
        say "would write $2"
        return
    fi
    mkdir -p -- "$(dirname -- "$2")"
    cp -- "$1" "$2.new"
    chmod 0644 -- "$2.new"
    mv -f -- "$2.new" "$2"
    say "wrote $2"
}

# Removes a file, if it is there.
drop() {
    if [ -e "$1" ]; then
        act rm -f -- "$1"
    fi
}

# Removes $1, the unit in which earlier versions swept at night; $2 is tunerd's program.
drop_sweep() {
    timers=
    if [ -e "$1" ] && [ -z "$dest" ]; then
        timers=$(manager show --property=TriggeredBy --value tunerd-sweep.service 2>/dev/null || true)
    fi
    drop "$1"
    if [ -n "$timers" ]; then
        warn "$timers starts tunerd-sweep.service, which is gone: the daemon begins nights as jobs."
        warn "  tunerd schedule set does it, or a service of your own with ExecStart=$2 sweep night --yes"
    fi
}

# Links $2 to $1; what somebody else put there stays.
link() {
    if [ "$(readlink -- "$2" || true)" = "$1" ]; then
        return
    fi
    if [ -e "$2" ] || [ -L "$2" ]; then
        warn "kept $2, which is not tunerd's; tunerd's own is $1"
        return
    fi
    act mkdir -p -- "$(dirname -- "$2")"
    act ln -s -- "$1" "$2"
}

unlink_ours() {
    if [ "$(readlink -- "$2" || true)" = "$1" ]; then
        act rm -f -- "$2"
    fi
}

# Installs the settings file $1, with $2 as the copy of what was shipped. One that was changed stays.
put_settings() {
    if [ -L "$1" ] && [ ! -e "$1" ]; then # where its disk is not mounted, say
        warn "kept $1, a link to what is not there: tunerd goes by the settings that it had until it is"
    elif [ -e "$1" ] && ! cmp -s -- "$1" "$2" && ! cmp -s -- "$1" "$here/units/tunerd.toml"; then
        say "kept your $1; the shipped one is $2"
        # Whoever knows the address of a webhook may read what is posted there, and post as well.
        if [ -f "$1" ] && grep -q '^[^#]*webhook' -- "$1"; then
            act chmod go-rwx -- "$1"
        fi
    else
        put "$here/units/tunerd.toml" "$1"
    fi
    put "$here/units/tunerd.toml" "$2"
}

# --- the whole machine ---

system_files() {
    say "$lib/systemd/system/tunerd.service"
    say "$lib/systemd/system/tunerd.socket"
    say "$lib/systemd/system/tunerd-daemon.socket"
    say "$lib/systemd/system/tunerd-web.service"
    say "$lib/systemd/system/tunerd-sweep.service" # of an earlier version
    say "$lib/systemd/system/tunerd-notify@.service" # of an earlier version
    say "$lib/sysusers.d/tunerd.conf"
    say "$lib/tmpfiles.d/tunerd.conf"
}

install_system() {
    if [ "$(id -u)" != 0 ] && [ -z "$dest" ] && [ "$dry" = no ]; then
        die 'installing for the whole machine needs root' \
            'use sudo, or choose --user or --try'
    fi
    umask 022
    prepare_environment "$dest$prefix"
    if systemd_runs; then
        make_way /var/lib/tunerd
    fi
    put_environment "$dest$prefix"
    put "$here/units/tunerd.service" "$dest$lib/systemd/system/tunerd.service"
    put "$here/units/tunerd.socket" "$dest$lib/systemd/system/tunerd.socket"
    put "$here/units/tunerd-daemon.socket" "$dest$lib/systemd/system/tunerd-daemon.socket"
    put "$here/units/tunerd-web.service" "$dest$lib/systemd/system/tunerd-web.service"
    drop_sweep "$dest$lib/systemd/system/tunerd-sweep.service" "$prefix/bin/tunerd"
    drop "$dest$lib/systemd/system/tunerd-notify@.service" # of an earlier version
    put "$here/units/tunerd.sysusers" "$dest$lib/sysusers.d/tunerd.conf"
    put "$here/units/tunerd.tmpfiles" "$dest$lib/tmpfiles.d/tunerd.conf"
    each_link link "$prefix" "$dest/usr/local/bin" "$dest/usr/local/share"
    link "$prefix/bin/tunerd-llama-server" "$dest/usr/local/bin/tunerd-llama-server"
    act mkdir -p -- "$dest/etc/tunerd/profiles"
    put_settings "$dest/etc/tunerd/tunerd.toml" "$dest$prefix/share/tunerd/tunerd.toml"
    if [ -n "$dest" ]; then
        act rm -f -- "$dest$prefix.lock"
        say "files are below $dest; on the machine itself run systemd-sysusers, systemd-tmpfiles"
        say '--create and systemctl enable --now tunerd.service'
        return
    fi
    start_system
    done_with "tunerd is installed. $(untouched)" || return 0
    say '  next       tunerd detect, tunerd profiles list, tunerd plan PROFILE'
    say '  who may    root, and members of group tunerd through the daemon: usermod -aG tunerd NAME'
    say "  to undo    sudo $prefix/share/tunerd/install.sh --uninstall"
}

start_system() {
    exec 8<&- 9<&- # what begins now may change something; a failure still starts the daemon
    why='journalctl --unit=tunerd says why; what served before still serves'
    if ! command -v systemd-sysusers >/dev/null; then
        warn 'there is no systemd here: no accounts were made, and no service was enabled'
        let_go
        return
    fi
    act systemd-sysusers "$lib/sysusers.d/tunerd.conf"
    act systemd-tmpfiles --create "$lib/tmpfiles.d/tunerd.conf"
    if systemd_runs; then
        act systemctl daemon-reload
        act systemctl --quiet enable tunerd.service
        # A socket is not handed to a service that runs already.
        act systemctl stop tunerd.service
        act systemctl restart tunerd.socket tunerd-daemon.socket ||
            die 'tunerd.socket did not start' "$why"
        act systemctl start tunerd.service || die 'tunerd.service did not start' "$why"
        let_go
    else
        let_go
        act systemctl --quiet enable tunerd.service
        say 'systemd does not run here; tunerd.service will start at the next boot'
    fi
}

# Units, drop-ins and backups that start a program of environment $1, by a link in folder $2 or not,
# one a line.
users_of() {
    for folder in /etc/systemd/system /root/.config/systemd/user /home/*/.config/systemd/user \
        "${XDG_CONFIG_HOME:-${HOME:-/root}/.config}/systemd/user"; do
        for unit in "$dest$folder"/*.service "$dest$folder"/*.service.pre-* \
            "$dest$folder"/*.service.d/*.conf; do
            if [ -f "$unit" ] && grep -qFD skip -e "$1/bin/" -e "$2/tunerd-llama-server" -- "$unit"; then
                say "$unit"
            fi
        done
    done | sort -u
}

# A swap that was cut short is mended with the very program that is about to go. A record that recovery
# set aside as damaged stays there for people.
refuse_during_swap() {
    for record in "$1"/*.json; do
        if [ -e "$record" ]; then
            die "a swap was interrupted: $record" 'run tunerd recover, then try again'
        fi
    done
}

manager() {
    if [ "$mode" = user ]; then
        systemctl --user "$@"
    else
        systemctl "$@"
    fi
}

# Sees to it that nothing of tunerd's runs while its program is replaced or goes, and that nothing
# begins before `let_go`: a change is waited for, a measurement ends and the server is back, and what
# watches, judges and tells ends too. $1 is tunerd's state.
make_way() {
    [ -d "$1" ] || return 0
    if [ "$dry" = yes ]; then
        say 'would wait for a change under way, then stop what tunerd measures and watches'
        return 0
    fi
    (umask 077 && : >>"$1/lock" && : >>"$1/measure.lock")
    exec 9<"$1/lock"
    wait_for_lock 9 'a change is under way'
    [ "$uninstall" = no ] || refuse_during_swap "$1/journal"
    if manager --quiet is-active tunerd.service 2>/dev/null; then
        # An installation that fails leaves the daemon running.
        trap 'status=$?; undo; let_go; manager restart tunerd.service; exit $status' EXIT
        trap 'exit 130' HUP INT PIPE TERM
    fi
    measured=$(units_up 'tunerd-lease-*')
    # Leases come last: what was measured in a terminal ends with them, sweeps and jobs end their own.
    for pattern in tunerd.socket tunerd-daemon.socket tunerd-web.service tunerd.service \
        tunerd-sweep.service 'tunerd-job-*' 'tunerd-guard*' 'tunerd-notify*' 'tunerd-probation-*' \
        tunerd-hand-in.service 'tunerd-lease-*'; do
        end_units "$pattern"
    done
    exec 8<"$1/measure.lock"
    wait_for_lock 8 'a measurement is under way'
    folder=/run/systemd/system
    [ "$mode" = system ] || folder=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}/systemd/user
    for name in job probation guard notify; do # as earlier versions left them
        rm -f -- "$folder/tunerd-$name"*.service
    done
}

# Names of the units that run and look like $1.
units_up() {
    manager list-units --plain --full --no-legend --state=active,activating,deactivating \
        "$1" 2>/dev/null | sed 's/ .*//'
}

# Ends the units whose names look like $1; a stop returns when the server is back.
end_units() {
    for unit in $(units_up "$1"); do
        say "stopping $unit ..."
        manager stop "$unit" || true
    done
}

# Takes the lock that is open as $1; $2 is what holds it.
wait_for_lock() {
    if ! flock --nonblock "$1"; then
        say "$2; waiting for it to end ..."
        flock --timeout 1800 "$1" || die "$2, and does not end" 'nothing was replaced; try again later'
    fi
}

# What was kept from running may run again.
let_go() {
    trap - EXIT HUP INT PIPE TERM
    exec 8<&- 9<&-
}

# Removes environment $1 and the link in folder $2 to its server, unless a unit or a backup needs them.
remove_environment() {
    act rm -rf -- "$dest$1.lock" "$dest$1.new" # the second of an installation that was killed
    needed=$(users_of "$1" "$2")
    if [ -z "$needed" ]; then
        unlink_ours "$1/bin/tunerd-llama-server" "$dest$2/tunerd-llama-server"
        act rm -rf -- "$dest$1" "$dest$1.old"
        return
    fi
    say "kept $1: these start the server in it:"
    printf '%s\n' "$needed" | LC_ALL=C sed 's/[^ -~]/?/g; s/^/  /' # names are of others' choice
    say "  once you need none of them: rm -r $1 $2/tunerd-llama-server"
}

uninstall_system() {
    if [ "$(id -u)" != 0 ] && [ -z "$dest" ] && [ "$dry" = no ]; then
        die 'removing tunerd from the machine needs root' 'use sudo'
    fi
    refuse_during_swap "$dest/var/lib/tunerd/journal"
    if systemd_runs; then
        make_way /var/lib/tunerd
    fi
    if systemd_runs && [ -e "$lib/systemd/system/tunerd.service" ]; then
        act systemctl --quiet disable --now tunerd.socket tunerd-daemon.socket tunerd.service
    else
        act rm -f -- "$dest/etc/systemd/system/multi-user.target.wants/tunerd.service"
        act rm -f -- "$dest/etc/systemd/system/sockets.target.wants/tunerd.socket"
        act rm -f -- "$dest/etc/systemd/system/sockets.target.wants/tunerd-daemon.socket"
    fi
    for file in $(system_files); do
        act rm -f -- "$dest$file"
    done
    each_link unlink_ours "$prefix" "$dest/usr/local/bin" "$dest/usr/local/share"
    remove_environment "$prefix" /usr/local/bin
    let_go
    act rm -rf -- "$dest/run/tunerd"
    if systemd_runs; then
        act systemctl daemon-reload
    fi
    done_with 'tunerd is removed. These were left as they are:' || return 0
    say '  the server and its unit, and the backups beside it (UNIT.pre-*); to have back what was there'
    say '    before tunerd: cp the oldest backup that tunerd made over the unit, then systemctl'
    say '    daemon-reload and restart it'
    say '  /var/lib/tunerd (history, and kept engines, which a unit may start), /etc/tunerd (settings)'
    say '  the group tunerd, the accounts tunerd-web and llama-server with /var/lib/llama-server'
    say '  to remove those as well: rm -r /var/lib/tunerd /etc/tunerd; userdel tunerd-web; groupdel tunerd'
    say '  once no server runs as llama-server: userdel llama-server; rm -r /var/lib/llama-server'
}

# --- one user ---

user_places() {
    if [ "$(id -u)" = 0 ]; then
        die 'root installs for the whole machine' 'leave --user out, or run this as that user'
    fi
    data=${XDG_DATA_HOME:-$HOME/.local/share}
    config=${XDG_CONFIG_HOME:-$HOME/.config}
    state=${XDG_STATE_HOME:-$HOME/.local/state}
    bin=$HOME/.local/bin
}

user_manager_runs() { systemctl --user show-environment >/dev/null 2>&1; }

# Whether the service manager, which may not have the variables of this shell, looks for units in folder $1.
user_manager_reads() {
    systemctl --user show --property=UnitPath --value | grep -qF -e "$1" -e "$(realpath -m -- "$1")"
}

install_user() {
    user_places
    why='journalctl --user --unit=tunerd says why; what served before still serves'
    if [ -n "${XDG_DATA_HOME:-}" ] && user_manager_runs && ! user_manager_reads "$data/systemd/user"; then
        die "your service manager does not look for units in $data/systemd/user" \
            'call this again without XDG_DATA_HOME, which only this shell has'
    fi
    prepare_environment "$data/tunerd/venv"
    make_way "$state/tunerd"
    put_environment "$data/tunerd/venv"
    each_link link "$data/tunerd/venv" "$bin" "$data"
    link "$data/tunerd/venv/bin/tunerd-llama-server" "$bin/tunerd-llama-server"
    program=$(printf '%s\n' "$data/tunerd/venv/bin/tunerd" | sed 's/%/%%/g; s/[\\|&]/\\&/g')
    unit=$(mktemp)
    sed "s|@TUNERD@|\"$program\"|" "$here/units/tunerd-user.service.in" >"$unit"
    put "$unit" "$data/systemd/user/tunerd.service"
    rm -f -- "$unit"
    drop_sweep "$data/systemd/user/tunerd-sweep.service" "$data/tunerd/venv/bin/tunerd"
    drop "$data/systemd/user/tunerd-notify@.service" # of an earlier version
    let_go
    act mkdir -p -- "$config/tunerd/profiles"
    put_settings "$config/tunerd/tunerd.toml" "$data/tunerd/tunerd.toml"
    if user_manager_runs; then
        act systemctl --user daemon-reload
        act systemctl --user --quiet enable tunerd.service
        act systemctl --user restart tunerd.service || die 'tunerd.service did not start' "$why"
    else
        say 'your service manager is not running: tunerd.service was not enabled'
    fi
    done_with "tunerd is installed in your home. $(untouched)" || return 0
    say "  next       $bin/tunerd detect"
    if [ "$(loginctl show-user "$(id -un)" --property=Linger --value 2>/dev/null)" = no ]; then
        say '  note       your units end when you log out, unless you run: loginctl enable-linger'
    fi
    say "  to undo    $data/tunerd/venv/share/tunerd/install.sh --user --uninstall"
}

uninstall_user() {
    user_places
    why='journalctl --user --unit=tunerd says why; what served before still serves'
    refuse_during_swap "$state/tunerd/journal"
    make_way "$state/tunerd"
    if user_manager_runs && [ -e "$data/systemd/user/tunerd.service" ]; then
        act systemctl --user --quiet disable --now tunerd.service
    fi
    act rm -f -- "$data/systemd/user/tunerd.service" "$data/systemd/user/tunerd-sweep.service" \
        "$data/systemd/user/tunerd-notify@.service"
    act rm -f -- "$data/tunerd/tunerd.toml"
    each_link unlink_ours "$data/tunerd/venv" "$bin" "$data"
    remove_environment "$data/tunerd/venv" "$bin"
    [ ! -d "$data/tunerd" ] || act rmdir --ignore-fail-on-non-empty -- "$data/tunerd"
    let_go
    if user_manager_runs; then
        act systemctl --user daemon-reload
    fi
    done_with 'tunerd is removed. These were left as they are:' || return 0
    say '  your server and its unit, and the backups beside it (UNIT.pre-*)'
    say "  $state/tunerd (history), $config/tunerd (settings)"
}

# --- trying it out ---

# Runs tunerd in the folder, and shows what was typed.
show() {
    printf '\n%s$ tunerd %s%s\n' "$bold" "$*" "$plain"
    tunerd "$@"
}

tunerd() { "$try_dir/tunerd" "$@"; }

try_command() {
    cat <<'EOF'
#!/bin/sh
# tunerd as the try-out runs it: all that it writes stays in this folder.
here=$(dirname -- "$(realpath -- "$0")")
unset $(env | sed -n 's/^\(TUNERD_[A-Za-z0-9_]*\)=.*/\1/p')
TUNERD_MODE=local TUNERD_CONFIG_DIR=$here/config TUNERD_STATE_DIR=$here/state TUNERD_RUNTIME_DIR=$here/run \
    TMPDIR=$here/tmp XDG_CACHE_HOME=$here/cache exec "$here/venv/bin/tunerd" "$@"
EOF
}

stop_try() {
    if [ -e "$try_dir/run/supervise.pid" ]; then
        pid=$(tr -cd '0-9\n' <"$try_dir/run/supervise.pid" | head -n 1)
        # What a killed one left may be the number of anybody's process by now.
        grep -qs supervis "/proc/$pid/cmdline" || return 0
        kill "$pid" 2>/dev/null || return 0
        tries=0
        while kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 150 ]; do
            sleep 0.1
            tries=$((tries + 1))
        done
    fi
}

end_try() {
    status=$?
    stop_try
    if [ "$status" != 0 ]; then
        warn "the try-out stopped early; to remove it: rm -r '$try_dir'"
    fi
    exit "$status"
}

# A request as any client sends it; how fast it was answered is left in $try_dir/tmp/tok_s.
ask() {
    printf '\n%s$ POST http://127.0.0.1:%s/v1/chat/completions%s\n' "$bold" "$port" "$plain"
    "$try_dir/venv/bin/python" -I - "$port" "$try_dir/tmp/tok_s" <<'EOF'
import json, pathlib, sys, urllib.request
request = {"messages": [{"role": "user", "content": "write code"}], "max_tokens": 192}
url = f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions"
headers = {"Content-Type": "application/json"}
body = urllib.request.Request(url, json.dumps(request).encode(), headers)
answer = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(body, timeout=60))
timings = answer["timings"]
rate = f"{timings['predicted_per_second']:.0f}"
print(" ", " ".join(answer["choices"][0]["message"]["content"].split()[:10]), "...")
print(f"  {timings['predicted_n']} tokens, {rate} tok/s, "
      f"{timings.get('draft_n_accepted', 0)} of {timings.get('draft_n', 0)} drafted accepted")
pathlib.Path(sys.argv[2]).write_text(rate)
EOF
}

try_out() {
    if [ -e "$try_dir" ] && [ ! -e "$try_dir/.made-by-tunerd-try" ]; then
        [ -z "$(ls -A -- "$try_dir")" ] || die "there is something else in $try_dir" 'name a new folder'
    fi
    case $(realpath -m -- "$try_dir") in
    *[\'\"\\]*) die "no unit can name a program in $try_dir: it has a quote or a backslash" 'name another folder' ;;
    esac
    if [ "$dry" = yes ]; then
        say "would install tunerd into $try_dir/venv and run detect, plan, apply, rollback, a sweep there"
        done_with '' || return 0
        return
    fi
    find_library "$(find_python)"
    mkdir -p -- "$try_dir"
    try_dir=$(CDPATH='' cd -- "$try_dir" && pwd)
    : >"$try_dir/.made-by-tunerd-try"
    printf '*\n' >"$try_dir/.gitignore"
    stop_try
    trap end_try EXIT
    trap 'exit 130' HUP INT PIPE TERM
    rm -rf -- "$try_dir/state" "$try_dir/run" "$try_dir/models" "$try_dir/config"
    mkdir -p -- "$try_dir/tmp" "$try_dir/models" "$try_dir/config/profiles"
    mkdir -- "$try_dir/run"
    chmod 0700 -- "$try_dir/run"
    try_settings >"$try_dir/config/tunerd.toml"
    for variable in $(env | sed -n 's/^\(TUNERD_[A-Z_]*\)=.*/\1/p'); do
        unset "$variable"
    done
    (
        PIP_CACHE_DIR=$try_dir/cache/pip TMPDIR=$try_dir/tmp
        export PIP_CACHE_DIR TMPDIR
        prepare_environment "$try_dir/venv"
        put_environment "$try_dir/venv"
    )
    port=$(free_port)
    try_profile >"$try_dir/config/profiles/mine.toml"
    try_command >"$try_dir/tunerd"
    chmod +x -- "$try_dir/tunerd"
    bold='' plain=''
    if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
        bold=$(printf '\033[1m') plain=$(printf '\033[0m')
    fi
    main_job
    stop_try
    say ''
    say 'That was the main job, on a real llama.cpp server without a GPU. It is stopped again.'
    say "  $outcome"
    say "  the report   $try_dir/report.html"
    say "  look at it   $try_dir/state, $try_dir/config/profiles/mine.toml"
    say "  go on        '$try_dir/tunerd' apply mine, or any other command"
    say "  end that     kill \$(cat '$try_dir/run/supervise.pid')"
    say "  for real     sudo $here/install.sh   or   $here/install.sh --user"
    say "  remove it    rm -r '$try_dir'"
}

# A swap and the way back; then a search for something faster, its proof and its promotion.
main_job() {
    show detect
    show model new "$try_dir/models/designed-f32.gguf" --shape f32
    show plan mine
    show apply mine --yes
    ask
    show apply mine --set serving.ctx_size=1024 --yes
    show rollback --yes
    show sweep run --budget 210s --yes || [ $? -eq 1 ] # 1: nothing could be measured
    ask
    before=$(cat -- "$try_dir/tmp/tok_s")
    outcome="nothing was promoted, for the reason that the sweep gives above; still $before tok/s"
    if tunerd sweep show --json | grep -q '"verdict": *"promote"'; then
        if show promote --yes; then
            ask
            outcome="before $before tok/s, after $(cat -- "$try_dir/tmp/tok_s") tok/s; promoted: $(promoted)"
        else
            outcome="the winner was not kept, for the reason given above; still $before tok/s"
        fi
    fi
    show status
    show history
    show report --output "$try_dir/report.html"
}

# What the promotion set, in one line.
promoted() {
    sed -n 's/^\[\(.*\)\]$/\1:/p; s/^\([a-z_]*\) = \(.*\)/\1 = \2,/p' "$try_dir/state/tuned/mine.toml" |
        paste -s -d ' ' | sed 's/,$//'
}

# A model this small shows at once whether it stays; a busy machine lets nothing be proved, and there
# the sweep soon gives way.
try_settings() {
    cat <<EOF
[models]
dirs = [$(toml_string "$try_dir/models")]

[service]
settle_s = 0.5

[sweep]
patience_s = 20
EOF
}

# A profile as people write them: what serves, what is asked of it, and what a sweep may try.
try_profile() {
    cat <<EOF
description = "no speculation yet, for texts that repeat themselves"
extends = "cpu-embedded-baseline"

[model]
path = "designed-f32.gguf"

[serving]
port = $port
ctx_size = 768

[workload]
classes = [{ kind = "code", prompt_tokens = 16, answer_tokens = 144 }]

[sweep]
"speculation.type" = ["ngram-mod"]
"speculation.n_max" = [16]
"speculation.p_min" = [0.0]
"serving.threads" = [1]
"serving.n_ubatch" = [512]
EOF
}

toml_string() { "$(find_python)" -Ic 'import json, sys; print(json.dumps(sys.argv[1]))' "$1"; }

free_port() {
    "$try_dir/venv/bin/python" -Ic '
import socket
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1])'
}

# --- the call ---

# Shows how it is called, and why not as it was.
refuse() {
    usage >&2
    warn ''
    warn "error: $1"
    exit 2
}

# What is to be done is $1 alone.
choose() {
    if [ -n "$mode" ] && [ "$mode" != "$1" ]; then
        refuse "--$mode and --$1 exclude each other"
    fi
    mode=$1
}

while [ $# -gt 0 ]; do
    case $1 in
    --system | --user | --python) choose "${1#--}" ;;
    --try)
        choose try
        try_dir=$here/.try
        case ${2:-} in
        '' | -*) ;;
        *)
            try_dir=$2
            shift
            ;;
        esac
        ;;
    --uninstall) uninstall=yes ;;
    --dry-run) dry=yes ;;
    --without-embedded) embedded='' ;;
    --with-fleet) fleet=fleet ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) refuse "no such option: $1" ;;
    esac
    shift
done
case $dest in
'' | /*) ;;
*) die 'DESTDIR is not an absolute path' ;;
esac
if [ -z "$mode" ]; then
    if [ "$(id -u)" != 0 ] && [ -z "$dest" ]; then
        usage >&2
        die 'without root, choose what to do' '--try shows what tunerd does, --user installs it for you'
    fi
    mode=system
fi
case $mode-$uninstall in
python-*)
    python=$(find_python)
    find_library "$python"
    say "$python"
    ;;
try-no) try_out ;;
try-yes) die 'to remove a try-out, remove its folder' ;;
system-no) install_system ;;
system-yes) uninstall_system ;;
user-no) install_user ;;
user-yes) uninstall_user ;;
esac
