"""Evidence handed in on a real systemd: by the daemon, through a unit as confined as a sweep's."""

from __future__ import annotations

import pytest

from tests.support.deployment import place_units
from tests.support.machine import Machine

pytestmark = pytest.mark.timeout(1800)

PASSWORD = "hush-hush"  # noqa: S105  of this machine
UNTIL = """
until [ "$(psql --no-psqlrc -At -h /srv/db -U tunerd tunerd -c '{asked}')" = {is_} ]; do sleep 0.5; done
"""
DATABASE = f"""
set -e
command -v psql >/dev/null || exit 77
install -d -o postgres -m 755 /srv/db
cd /usr/lib/postgresql/*/bin
setpriv --reuid=postgres --regid=postgres --clear-groups ./initdb --no-sync -U tunerd -A trust -D /srv/db/data >/dev/null
echo 'local all all trust
host all all 127.0.0.1/32 scram-sha-256' >/srv/db/data/pg_hba.conf
cat >/run/systemd/system/db.service <<END
[Service]
User=postgres
ExecStart=$PWD/postgres -D /srv/db/data -k /srv/db -c listen_addresses=127.0.0.1 -c fsync=off
END
systemctl daemon-reload
systemctl start db
until psql -h /srv/db -U tunerd postgres -c "alter role tunerd password '{PASSWORD}'"; do sleep 0.2; done
createdb -h /srv/db -U tunerd tunerd
install -d -m 755 /etc/tunerd
install -m 600 /dev/null /etc/tunerd/pgpass
echo '127.0.0.1:*:tunerd:tunerd:{PASSWORD}' >/etc/tunerd/pgpass
"""
SAMPLES = "select count(*) from entry where kind = $$sample$$"
SETTINGS = """
[store]
url = "postgresql+psycopg://tunerd@127.0.0.1/tunerd?passfile=/etc/tunerd/pgpass"
box = "gpu1"
"""
CREDENTIAL = """
[Service]
LoadCredential=pgpass:/etc/tunerd/credential
Environment=PGPASSFILE=%d/pgpass
"""
MEASURE = """
from pathlib import Path
from tests.support.synthetic_runs import made_runs
from tunerd.measure.store import EvidenceStore
with EvidenceStore(Path("/var/lib/tunerd/evidence.db")) as store:
    for made in made_runs():
        made.put(store)
    print(sum(run.n_samples for run in store.runs()))
"""


def test_the_daemon_hands_in_what_was_measured_and_says_once_that_it_cannot(
    host_machine: Machine,
) -> None:
    machine = host_machine
    machine.sh(DATABASE)
    place_units(machine, "tunerd.service")
    machine.write("/etc/tunerd/tunerd.toml", SETTINGS)
    n = machine.python("-c", MEASURE).stdout.strip()

    machine.systemctl("start", "tunerd")

    for asked, is_ in (("select name from box", "gpu1"), (SAMPLES, n)):
        machine.sh(UNTIL.format(asked=asked, is_=is_))

    machine.systemctl("stop", "db")
    machine.systemctl("restart", "tunerd")
    said = "journalctl --unit tunerd --output cat | grep --count 'is not handed in'"
    machine.sh(f'until [ "$({said})" = 1 ]; do sleep 0.5; done')
    assert machine.show("tunerd", "NRestarts") == "0"
    assert "not handed in" in machine.run("tunerd", "status").stderr
    assert PASSWORD not in "".join(machine.journal())

    machine.systemctl("start", "db")
    assert machine.run("tunerd", "fleet", "hand-in").stdout.startswith(
        "gpu1: nothing new to hand in"
    )
    assert "gpu1" in machine.run("tunerd", "fleet", "status").stdout

    # A password as a credential: for the unit alone, in place of the file that the address names.
    machine.sh("mv /etc/tunerd/pgpass /etc/tunerd/credential")
    machine.write("/etc/systemd/system/tunerd-hand-in.service.d/password.conf", CREDENTIAL)
    machine.write("/etc/tunerd/tunerd.toml", SETTINGS.replace("?passfile=/etc/tunerd/pgpass", ""))
    machine.systemctl("daemon-reload")
    forgotten = "with done as (update box set name = $$x$$ returning 1) select 1 from done"
    machine.sh(UNTIL.format(asked=forgotten, is_="1"))
    machine.systemctl("restart", "tunerd")
    machine.sh(UNTIL.format(asked="select name from box", is_="gpu1"))
