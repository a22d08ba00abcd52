"""Pipeline schedules by name, and how they run in time; what a schedule is stands in `refpar/parallel/schedule.py`."""
