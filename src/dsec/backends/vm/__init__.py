"""What both kinds of virtual machine share: monitors, guests, disks, templates. Not a backend."""
