//! Files, written whole or not at all and judged before they are read.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;

use turboquant_wgpu::{CacheConfig, Snapshot};

use crate::manifest::{self, Header};
use crate::{Container, ContainerError};

/// Writes a container to a file, whole or not at all.
///
/// The bytes go to a temporary file in the same directory, named `.NAME.*.tmp`; once they are on
/// the disk it takes the place of `path`. Whatever interrupts this, the old file or the new one is
/// there. Only a killed process leaves its temporary file behind.
///
/// # Errors
/// What [`crate::encode`] refuses, before the file system is touched; a file system that refuses.
pub fn save(
    path: &Path,
    config: &CacheConfig,
    layers: &[Option<Snapshot>],
    producer: &str,
) -> Result<(), ContainerError> {
    // A run that counts bytes finds every refusal before there is a file.
    manifest::write(config, layers, producer, &mut std::io::sink())?;
    replace(path, |file| manifest::write(config, layers, producer, file))
}

fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> Result<(), ContainerError>,
) -> Result<(), ContainerError> {
    let failed = |action| {
        move |error| ContainerError::File {
            action,
            path: path.to_owned(),
            error,
        }
    };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!(".{name}.");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".tmp");
    // As an ordinary new file: readable as the umask says, not by the owner alone.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let temporary = builder
        .tempfile_in(directory)
        .map_err(failed("create a temporary file beside"))?;

    let mut writer = BufWriter::with_capacity(1 << 20, temporary.as_file());
    write(&mut writer)?;
    writer.flush().map_err(failed("write"))?;
    drop(writer);
    // The rename must not reach the disk before the bytes do.
    temporary.as_file().sync_all().map_err(failed("sync"))?;
    temporary
        .persist(path)
        .map_err(|error| failed("replace")(error.error))?;
    // Nor is the rename on the disk before its directory is.
    #[cfg(unix)]
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(failed("sync the directory of"))?;
    Ok(())
}

/// A container's file, judged by header and length alone: what is wrong with either is found
/// without reading, or having room for, the rest.
#[derive(Debug)]
pub struct ContainerFile {
    file: File,
    header: Header,
}

impl Container<'_> {
    /// Opens a file and judges it by its header and its length.
    ///
    /// # Errors
    /// No such file, or what is wrong with its header or length.
    pub fn open(path: &Path) -> Result<ContainerFile, ContainerError> {
        let failed = |error| ContainerError::File {
            action: "open",
            path: path.to_owned(),
            error,
        };
        let mut file = File::open(path).map_err(failed)?;
        let total = file.metadata().map_err(failed)?.len();
        let header = Header::read(&mut file, total)?;
        Ok(ContainerFile { file, header })
    }
}

impl ContainerFile {
    /// What the container says of itself. Its tensors have not been looked at.
    #[must_use]
    pub fn describe(&self) -> &crate::Manifest {
        self.header.manifest()
    }

    /// Bytes of all tensors, which [`ContainerFile::read`] is going to read.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.header.data_bytes()
    }

    /// Checks the file against a cache's configuration, before the tensors are read.
    ///
    /// # Errors
    /// What differs.
    pub fn check(self, config: &CacheConfig) -> Result<Self, ContainerError> {
        self.header.manifest().check(config)?;
        Ok(self)
    }

    /// Reads the tensors into `data`, whose contents are replaced, and judges them.
    ///
    /// # Errors
    /// A file that cannot be read or has changed, a machine without room, a damaged tensor.
    pub fn read(self, data: &mut Vec<u8>) -> Result<Container<'_>, ContainerError> {
        let Self { file, header } = self;
        let bytes = header.data_bytes();
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        data.clear();
        data.try_reserve_exact(len)
            .map_err(|_| ContainerError::Allocation { bytes })?;
        let found = file.take(bytes).read_to_end(data)?;
        if found < len {
            let start = header.data_start() as u64;
            return Err(ContainerError::Length {
                found: start + found as u64,
                expected: start + bytes,
            });
        }
        Container::with_data(&header, data)
    }
}
