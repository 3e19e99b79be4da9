//! What must be known of running sandboxes after this daemon's death: a small file each, in the pinned namespace.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Doing, Error, Result};
use crate::wire::{encode, LaunchPlan, Launched, ResourceView, ViewKind};

const RECORDS: &str = ".sandboxes";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    pub sandbox: String,
    pub pid: i32,
    pub start_ticks: u64,
    /// Digests of the layers that it keeps in use.
    pub lowers: Vec<String>,
    /// The file of its memory cgroup that counts kills.
    pub oom_file: Option<PathBuf>,
    /// What it is to be shown of the machine, how it is, and by which lxcfs.
    #[serde(default)]
    pub view: Option<ResourceView>,
    #[serde(default)]
    pub view_kind: ViewKind,
    #[serde(default)]
    pub view_server: Option<i32>,
}

impl Record {
    pub fn new(plan: &LaunchPlan, launched: &Launched, view_server: Option<i32>) -> Record {
        let v1 = plan
            .cgroup1
            .get("memory")
            .map(|path| Path::new(path).join("memory.oom_control"));
        let v2 = plan
            .cgroup2
            .as_ref()
            .map(|path| Path::new(path).join("memory.events"));
        Record {
            sandbox: plan.sandbox.clone(),
            pid: launched.pid,
            start_ticks: launched.start_ticks,
            lowers: plan.lowers.clone(),
            oom_file: v1.or(v2),
            view: plan.view,
            view_kind: launched.view,
            view_server,
        }
    }

    /// How many of its processes the kernel has killed for memory; 0 where that is not known.
    pub fn oom_kills(&self) -> u64 {
        let text = self
            .oom_file
            .as_ref()
            .and_then(|path| std::fs::read_to_string(path).ok())
            .unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or(0)
    }
}

pub struct Records {
    directory: PathBuf,
}

impl Records {
    pub fn open(layers: &Path) -> Result<Records> {
        let directory = layers.join(RECORDS);
        std::fs::create_dir_all(&directory).doing_to("make", &directory)?;
        Ok(Records { directory })
    }

    pub fn write(&self, record: &Record) -> Result<()> {
        let path = self.directory.join(&record.sandbox);
        std::fs::write(&path, encode(record)?).doing_to("write", &path)
    }

    pub fn read(&self, sandbox: &str) -> Result<Record> {
        let path = self.directory.join(sandbox);
        let bytes = std::fs::read(&path).doing_to("read", &path)?;
        rmp_serde::from_slice(&bytes)
            .map_err(|error| Error::Invalid(format!("{}: {error}", path.display())))
    }

    /// Of a sandbox with a record; 0 where that is not known.
    pub fn oom_kills(&self, sandbox: &str) -> u64 {
        self.read(sandbox).map_or(0, |record| record.oom_kills())
    }

    pub fn remove(&self, sandbox: &str) -> Result<()> {
        let path = self.directory.join(sandbox);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other.doing_to("remove", &path),
        }
    }

    pub fn read_all(&self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&self.directory).doing_to("list", &self.directory)? {
            let path = entry.doing_to("list", &self.directory)?.path();
            let bytes = std::fs::read(&path).doing_to("read", &path)?;
            match rmp_serde::from_slice(&bytes) {
                Ok(record) => records.push(record),
                // Cut off by the death of its writer, who then had not answered yet either.
                Err(error) => {
                    eprintln!("{}", Error::Invalid(format!("{}: {error}", path.display())))
                }
            }
        }
        Ok(records)
    }
}
