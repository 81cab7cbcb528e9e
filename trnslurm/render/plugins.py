"""What plug-ins add to a job: causes of failures, and the code that sends messages.

Both are copied into the bundle, so that the nodes do not need the site's packages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trnslurm.config.plugins import Plugin, plugin_named
from trnslurm.config.schema import Cluster, Notify
from trnslurm.contract.rundir import NOTIFIER, NOTIFIERS, PLUGINS
from trnslurm.errors import ConfigError
from trnslurm.render.package import read, tree

_MOST_MIB = 4


def plugin_files(cluster: Cluster) -> dict[str, bytes]:
    """Return the files that a profile's plug-ins add to a bundle."""
    files = notifier_files(cluster.notify)
    if not cluster.causes:
        return files
    from trnslurm.render.site_causes import site_causes

    for entry in cluster.causes:
        name, text = site_causes(entry)
        file = f"{PLUGINS}/causes/{name}.json"
        if file in files:
            raise ConfigError(f"causes: two tables are named {name}: rename one of them")
        files[file] = text.encode()
    return files


def notifier_files(notify: Notify) -> dict[str, bytes]:
    """Return the code of the plug-in that sends messages: its top-level package or module."""
    if notify.plugin is None:
        return {}
    from trnslurm.node.notify import WAYS

    name = notify.plugin.partition(":")[0]
    if name in WAYS:  # the log of a run uses the names of both
        raise ConfigError(f"notify.plugin is {name}, which is built in: set notify.{name}")
    plugin = plugin_named("notifier", name, "notify.plugin")
    place = f"{NOTIFIERS}/{plugin.name}"
    files = {f"{place}/{name}": data for name, data in _module_files(plugin).items()}
    if sum(map(len, files.values())) > _MOST_MIB << 20:
        raise plugin.error(f"its package is larger than {_MOST_MIB} MiB, so a run cannot copy it")
    about = {"entry": plugin.value, "package": f"{plugin.package} {plugin.version}"}
    return files | {f"{place}/{NOTIFIER}": f"{json.dumps(about)}\n".encode()}


def _module_files(plugin: Plugin) -> dict[str, bytes]:
    import importlib.util  # few jobs have a plug-in

    top = plugin.module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "trnslurm":
        raise plugin.error(f"its module {top} would hide another module with that name")
    with plugin.blamed():
        found = importlib.util.find_spec(top)
    file = Path(found.origin) if found and found.origin else None
    if file and file.is_file() and found and found.submodule_search_locations:
        return dict(tree(file.parent, top))
    if file and file.is_file() and file.suffix == ".py":
        return {file.name: read(file)}
    raise plugin.error(
        f"a run cannot copy {top}, which is neither a package with files nor a .py file"
    )
