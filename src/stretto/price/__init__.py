"""What ops and communication take: models of devices and fabrics, clusters, calibration files."""
