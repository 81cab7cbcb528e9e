"""Moto's server of AWS's protocols, with what pcluster's dry runs ask for.

    .venv-pcluster/bin/python tests/parallelcluster/aws_stand_in.py PORT

Two things differ from moto 5.2: block devices need no size (EC2 takes the image's, and a node's own
disks have none), and there is DescribeCapacityReservations.
"""

import sys

from moto.core.responses import ActionResult
from moto.ec2.responses.instances import InstanceResponse
from moto.server import main

BLOCKS = {
    "cr-0dddddddddddddddd": "trn1.32xlarge",
    "cr-0eeeeeeeeeeeeeeee": "trn2.48xlarge",
    "cr-0ffffffffffffffff": "p5.48xlarge",
}


def _describe_capacity_reservations(self):
    """Return the capacity block that is asked for, of 16 instances."""
    [block] = self._get_param("CapacityReservationIds")
    found = {
        "CapacityReservationId": block, "InstanceType": BLOCKS[block], "State": "active",
        "AvailabilityZone": f"{self.region}a", "TotalInstanceCount": 16,
        "AvailableInstanceCount": 16, "ReservationType": "capacity-block", "Tenancy": "default",
        "InstancePlatform": "Linux/UNIX",
    }  # fmt: skip
    return ActionResult({"CapacityReservations": [found]})


if __name__ == "__main__":
    InstanceResponse._validate_block_device_mapping = staticmethod(lambda mapping: None)
    InstanceResponse.describe_capacity_reservations = _describe_capacity_reservations
    main(["-p", sys.argv[1]])
