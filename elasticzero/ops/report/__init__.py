"""Makes one page of HTML from the event logs of a job's agents.

Logs become lives of agents (`digest`), those of one run are chosen (`runs`) and become a
`RunSummary` (`summarize`), which becomes the page (`page`). Only `log_files` reads files.
"""
