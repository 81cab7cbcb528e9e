"""Moto's server of AWS's protocols, with what pcluster's dry runs ask for.

    .venv-pcluster/bin/python tests/parallelcluster/aws_stand_in.py PORT

Three things differ from moto 5.2: block devices need no size (EC2 takes the image's, and a node's
own disks have none), there is DescribeCapacityReservations, and a file system of FSx has an ID of
17 digits, a VPC and the network interfaces of its subnet.
"""

import sys

from moto.core.responses import ActionResult
from moto.ec2.models import ec2_backends
from moto.ec2.responses.instances import InstanceResponse
from moto.fsx.models import FileSystem
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


def _made(self, *arguments, make=FileSystem.__init__, **named):
    make(self, *arguments, **named)
    self.file_system_id = "fs-" + self.file_system_id.removeprefix("fs-").zfill(17)
    self.lustre_configuration |= {"MountName": "fsx"}


def _described(self, describe=FileSystem.to_dict):
    ec2 = ec2_backends[self.backend.account_id][self.backend.region_name]
    subnet = ec2.get_subnet(self.subnet_ids[0])
    interfaces = [eni.id for eni in ec2.enis.values() if eni.subnet.id == subnet.id]
    return describe(self) | {"VpcId": subnet.vpc_id, "NetworkInterfaceIds": interfaces}


if __name__ == "__main__":
    FileSystem.__init__, FileSystem.to_dict = _made, _described
    InstanceResponse._validate_block_device_mapping = staticmethod(lambda mapping: None)
    InstanceResponse.describe_capacity_reservations = _describe_capacity_reservations
    main(["-p", sys.argv[1]])
