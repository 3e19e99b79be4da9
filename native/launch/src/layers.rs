//! Layers: mounted once for the whole node, below the run directory in the pinned namespace, under their digests.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use dsec_sys::mounts::{self, attr};

use crate::agent::sha256_hex;
use crate::error::{Doing, Error, Result};
use crate::namespace::LAYERS;
use crate::steps::check::{check_name, check_path};
use crate::system::{c_path, c_text, Access, Entry, MountOption, System};
use crate::wire::{EtcFile, LayerMount};

/// Different sets of files in /etc for which a skeleton is kept.
const SKELETONS_MAX: usize = 64;
const SKELETONS: &str = ".skeleton";

pub struct Layers<'a> {
    system: &'a dyn System,
    directory: PathBuf,
    skeletons: HashMap<Vec<String>, PathBuf>,
}

impl<'a> Layers<'a> {
    /// The layers that are mounted below `run`. Places without a mount, which a daemon left that was killed in between, go.
    pub fn open(system: &'a dyn System, run: &Path) -> Result<Layers<'a>> {
        let layers = Layers {
            system,
            directory: run.join(LAYERS),
            skeletons: HashMap::new(),
        };
        let own = mount_of(system, &layers.directory)?;
        for name in layers.list()? {
            let path = layers.directory.join(name);
            if mount_of(system, &path)? == own {
                system.remove_dir(&path).doing_to("remove", &path)?;
            }
        }
        Ok(layers)
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where a mounted layer is; an error when it is not mounted.
    pub fn find(&self, digest: &str) -> Result<PathBuf> {
        check_name(digest)?;
        let path = self.directory.join(digest);
        match path.is_dir() {
            true => Ok(path),
            false => Err(Error::Refused {
                why: format!("layer {digest} is not mounted"),
                errno: libc::ENOENT,
            }),
        }
    }

    /// All layers that are mounted.
    pub fn list(&self) -> Result<Vec<String>> {
        let entries = self
            .system
            .directories_in(&self.directory)
            .doing_to("list", &self.directory)?;
        let names = entries
            .iter()
            .filter_map(|path| path.file_name()?.to_str().map(String::from));
        let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        Ok(names)
    }

    /// Mounts a layer. Nothing happens when it is there already; nothing is left when it fails.
    pub fn mount(&self, layer: &LayerMount) -> Result<()> {
        check_name(&layer.digest)?;
        layer
            .blob
            .iter()
            .chain([&layer.meta])
            .try_for_each(|path| check_path(path))?;
        let path = self.directory.join(&layer.digest);
        match self.system.make_dir(&path, 0o755) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => return Ok(()),
            other => other.doing_to("make", &path)?,
        }
        self.mount_at(layer, &path).inspect_err(|_| {
            // The first failure is the one to tell; an empty directory in our own tmpfs can be removed.
            let _ = self.system.remove_dir(&path);
        })
    }

    fn mount_at(&self, layer: &LayerMount, path: &Path) -> Result<()> {
        let mount = match (layer.kind.as_str(), &layer.blob) {
            ("erofs", blob) => {
                let mut options = vec![MountOption::Text(c"source", layer.meta.clone())];
                options.extend(
                    blob.iter()
                        .map(|blob| MountOption::Text(c"device", blob.clone())),
                );
                options.push(MountOption::Flag(c"ro"));
                let flags = attr::READ_ONLY | attr::NO_DEVICES;
                self.system
                    .make_mount(c"erofs", &options, flags)
                    .doing("mount", &layer.meta)?
            }
            ("directory", None) => {
                let source = c_text(&layer.meta).doing("name", &layer.meta)?;
                let copy = self
                    .system
                    .clone_mount(&source)
                    .doing("bind", &layer.meta)?;
                let flags = attr::READ_ONLY | attr::NO_DEVICES;
                self.system
                    .set_attributes(copy.as_fd(), flags)
                    .doing("make read-only", &layer.meta)?;
                copy
            }
            (kind, _) => {
                return Err(Error::Invalid(format!(
                    "a layer of kind {kind:?} with these files"
                )))
            }
        };
        let target = c_path(path).doing_to("name", path)?;
        self.system
            .attach_at(mount.as_fd(), &target)
            .doing_to("mount", path)
    }

    /// Unmounts a layer that no sandbox uses (the caller knows). Success when it is not there.
    pub fn unmount(&self, digest: &str) -> Result<()> {
        check_name(digest)?;
        let path = self.directory.join(digest);
        let target = c_path(&path).doing_to("name", &path)?;
        match mounts::unmount(&target, false) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {} // the place is there, the mount never was
            other => other.doing_to("unmount", &path)?,
        }
        self.system.remove_dir(&path).doing_to("remove", &path)
    }

    /// The lowest layer of every sandbox: mount points that an image may lack, and the files of /etc that will be bound over.
    /// One for each set of such files, named by it, so that it outlives the daemon as the sandboxes on it do.
    pub fn skeleton(&mut self, etc: &[EtcFile]) -> Result<PathBuf> {
        let mut files: Vec<String> = etc.iter().map(|file| file.path.clone()).collect();
        files.sort();
        files.dedup();
        if let Some(path) = self.skeletons.get(&files) {
            return Ok(path.clone());
        }
        if self.skeletons.len() == SKELETONS_MAX {
            return Err(Error::Invalid(format!(
                "more than {SKELETONS_MAX} different sets of files in /etc"
            )));
        }
        let above = self.directory.join(SKELETONS);
        std::fs::create_dir_all(&above).doing_to("make", &above)?;
        let path = above.join(sha256_hex(files.join("\0").as_bytes()));
        if !path.is_dir() {
            let making = above.join("making");
            self.system
                .remove_tree(&making)
                .doing_to("remove", &making)?;
            self.make_skeleton(&making, &files)?;
            std::fs::rename(&making, &path).doing_to("name", &path)?;
        }
        self.skeletons.insert(files, path.clone());
        Ok(path)
    }

    fn make_skeleton(&self, path: &Path, files: &[String]) -> Result<()> {
        self.system.make_dir(path, 0o755).doing_to("make", path)?;
        let at = self
            .system
            .open(path, Access::Directory)
            .doing_to("open", path)?;
        let put = |name: &str, entry| {
            let name = c_text(name).doing("name", name)?;
            self.system
                .put(at.as_fd(), &name, entry)
                .doing("make", name.to_string_lossy())
        };
        for name in ["proc", "sys", "dev", "etc"] {
            put(name, Entry::Directory { mode: 0o755 })?;
        }
        put("tmp", Entry::Directory { mode: 0o1777 })?;
        for file in files {
            let below = Path::new(file.trim_start_matches('/'));
            let parents: Vec<&Path> = below
                .ancestors()
                .skip(1)
                .filter(|path| path.components().count() > 1)
                .collect();
            for parent in parents.into_iter().rev() {
                match put(&parent.to_string_lossy(), Entry::Directory { mode: 0o755 }) {
                    Err(error) if error.errno() == Some(libc::EEXIST) => {}
                    other => other?,
                }
            }
            put(
                &below.to_string_lossy(),
                Entry::File {
                    mode: 0o644,
                    content: b"",
                },
            )?;
        }
        Ok(())
    }
}

fn mount_of(system: &dyn System, path: &Path) -> Result<u64> {
    let directory = system.open(path, Access::Path).doing_to("open", path)?;
    mounts::mount_id(directory.as_fd()).doing_to("look at", path)
}
