"""The variables that a run's processes tell each other, and those by which a user sets defaults.

The templates write the names as a reader of the scripts sees them; a test compares them with these.
"""

from __future__ import annotations

from trnslurm.contract.meant import Meant


class Variable(Meant):
    """The name of a variable, and what it means."""

    # Of a job: set by its batch script for all that it starts.
    RUN_DIR = "TRNSLURM_RUN_DIR", "the run's directory"
    PHASE = "TRNSLURM_PHASE", "precompile, train or prepare; of a server its role"
    ATTEMPT = "TRNSLURM_ATTEMPT", "the number of this start of the phase, from 1"
    DEVICE = "TRNSLURM_DEVICE", "the device for which the job was rendered"
    PYTHON = "TRNSLURM_PYTHON", "the Python of the job"
    DEFAULT_PYTHON = "TRNSLURM_DEFAULT_PYTHON", "PYTHON of the local cluster unless that is set"
    JOB = "TRNSLURM_JOB", "the job's id; of a step of another job JOB.STEP"
    RESTARTS = "TRNSLURM_RESTARTS", "how often Slurm had restarted the job"
    STARTED = "TRNSLURM_STARTED", "when the attempt has started"
    DOING = "TRNSLURM_DOING", "what the batch script does, for the reason of a failure"
    FILES = "TRNSLURM_FILES", "the directory of the node count's own files, in a job with a range"
    HOSTS = "TRNSLURM_HOSTS", "the nodes of the attempt, comma separated"
    ALLOCATION = "TRNSLURM_ALLOCATION", "the nodes of the job, spares included"
    CHOSEN = "TRNSLURM_CHOSEN", "the nodes that the next attempt is to have"
    PORTS = "TRNSLURM_PORTS", "two free ports of the first node"
    DEVICE_PORT = "TRNSLURM_DEVICE_PORT", "the second of them, for the device's own meeting point"
    STEP = "TRNSLURM_STEP", "the step's number, inside a job that the user holds"
    TASK = "TRNSLURM_TASK", "JOB_N of a task of a job array"
    TAKEN = "TRNSLURM_TAKEN", "the run that such a task takes, in a later rung of a sweep"
    GIVEN = "TRNSLURM_GIVEN", "the environment of the submitting shell, for a batch script"
    LOCAL = "TRNSLURM_LOCAL", "the directory of TorchNeuron's own files on a node's disk"
    INSIDE = "TRNSLURM_INSIDE", "the command that enters the container"
    VERSIONS = "TRNSLURM_VERSIONS", "the packages of the container's image"
    ARCHIVE = "TRNSLURM_ARCHIVE", "the packed environment that each node unpacks"
    # Of checkpoints and graphs.
    CHECKPOINTS = "TRNSLURM_CHECKPOINTS", "where a custom script saves"
    CHECKPOINT_GLOB = "TRNSLURM_CHECKPOINT_GLOB", "a pattern of the checkpoints of a custom script"
    RESUME = "TRNSLURM_RESUME", "the newest whole checkpoint; empty if there is none"
    RESUMES = "TRNSLURM_RESUMES", "told: a custom script takes {resume}; looks: it finds its files"
    FOLLOWED = "TRNSLURM_FOLLOWED", "the checkpoint of another run that this run follows"
    FOLLOWED_STEP = "TRNSLURM_FOLLOWED_STEP", "the step of that checkpoint"
    OUT = "TRNSLURM_OUT", "where a custom script writes results for other runs"
    INPUTS = "TRNSLURM_INPUTS", "the lines of bash that set what is taken from other runs"
    INPUT = "TRNSLURM_INPUT", "begins the variables of an input: TRNSLURM_INPUT_NAME_CHECKPOINT"
    EXPORT = "TRNSLURM_EXPORT", "the Hugging Face folder that is made of that checkpoint"
    CACHE = "TRNSLURM_CACHE", "the compile cache"
    CACHE_LAYOUT = "TRNSLURM_CACHE_LAYOUT", "one cache for all hosts, or a part for each"
    CACHE_TRUST = (
        "TRNSLURM_CACHE_TRUST",
        "users whose graphs are used, in addition to your own and those of root",
    )
    GRAPH_KEY = "TRNSLURM_GRAPH_KEY", "the key of the job's graphs"
    COMPILE_CACHE = "TRNSLURM_COMPILE_CACHE", "the graphs of xla-cpu"
    # Of the servers of roles.
    SERVERS = "TRNSLURM_SERVERS", "the nodes of each role: ROLE=NODE,NODE …"
    APART = "TRNSLURM_APART", "the nodes of a part of the job in another partition"
    OF_DEVICE = "TRNSLURM_OF_DEVICE", "the variables that are set for the training's nodes only"
    SERVER = "TRNSLURM_SERVER", "the number of this server in its role"
    OF_ROLE = "TRNSLURM_ROLE", "begins the variables of a role: TRNSLURM_ROLE_NAME_URLS"
    HOST = "TRNSLURM_HOST", "the address of this server's node"
    PORT = "TRNSLURM_PORT", "the port on which this server is to listen"
    # Of one node, and of the next attempt.
    NODE = "TRNSLURM_NODE", "the node's rank"
    COMMAND = "TRNSLURM_COMMAND", "the command of a node, in node.sh"
    PROFILE = "TRNSLURM_PROFILE", "after how many steps worker 0 records steps, and how many"
    BEATS = "TRNSLURM_BEATS", "where a node sends its signs of life"
    OTHERS = "TRNSLURM_OTHERS", "the descriptor that ends, for worker 0, when all others have ended"
    GATE = "TRNSLURM_GATE", "where standby workers wait"
    ASKED = "TRNSLURM_ASKED", "the descriptor to which the script tells what it would start"
    STANDBY = "TRNSLURM_STANDBY", "the number of the next attempt, whose workers wait"
    EVENT = "TRNSLURM_EVENT", "the event, for the command of a notification"
    STAND_IN_DEVICE = "TRNSLURM_STAND_IN_DEVICE", "what `doctor --run` trains on without devices"
    # A user's, for the command line.
    PATH = "TRNSLURM_PATH", "directories with jobs/, cluster-config/ and templates/"
    CLUSTER = "TRNSLURM_CLUSTER", "the profile that --cluster takes by default"
    SITE = (
        "TRNSLURM_SITE",
        "another file of locks, in addition to /etc/trnslurm/site.yaml, to try it",
    )
    ON = "TRNSLURM_ON", "the host that --on takes by default"
    SSH = "TRNSLURM_SSH", "the command to use instead of ssh"
    LOGIN = "TRNSLURM_LOGIN", "set on the other host once its login files are read"
    SANDBOX = "TRNSLURM_SANDBOX", "the sandbox whose shell this is"
    SANDBOXES = "TRNSLURM_SANDBOXES", "the directory of all sandboxes"
    SANDBOX_SLURM = "TRNSLURM_SANDBOX_SLURM", "the Slurm that a new sandbox starts"
