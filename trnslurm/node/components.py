"""The components of a heterogeneous job: all but the first have only nodes for roles.

Each component is a job with its own id, which the batch script gets with Slurm's other variables
(https://slurm.schedmd.com/heterogeneous_jobs.html#env_var).
"""

from __future__ import annotations

from collections.abc import Mapping

from trnslurm.contract.roles import read_roles
from trnslurm.contract.variables import Variable
from trnslurm.node.state import RUN


def component_ids(environ: Mapping[str, str]) -> list[str]:
    """Return the components' job ids, or nothing for an ordinary job."""
    ids = (environ[name] for name in environ if name.startswith("SLURM_JOB_ID_HET_GROUP_"))
    return sorted(ids, key=int)


def hosts_of_roles(environ: Mapping[str, str]) -> list[list[str]]:
    """Return the number of role nodes in each component; there is always a first component."""
    component = {role.name: role.component for role in read_roles(RUN.roles_file)}
    found: list[list[str]] = [[] for _ in range(1 + max(component.values(), default=0))]
    for told in environ.get(Variable.SERVERS, "").split():
        role, _, hosts = told.partition("=")
        found[component.get(role, 0)] += hosts.split(",")
    return found
