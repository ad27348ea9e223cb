"""What the report page is made of; `ponderttt/report.py` puts it together."""
