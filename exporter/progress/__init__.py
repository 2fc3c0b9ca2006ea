"""Work of the job: items done, phases, resumes, stalls, and the outlook."""
