//! The packages of the workspace, and the programs that commands find in them.

use crate::{exists, read};

/// A package: the folder of its manifest, which is empty for the root.
pub(crate) struct Package {
    folder: String,
    manifest: String,
}

/// Returns the packages that a command with these words is about.
pub(crate) fn selected(words: &[&str]) -> Vec<Package> {
    let named: Vec<&str> = words
        .windows(2)
        .filter(|pair| pair[0] == "-p")
        .map(|pair| pair[1])
        .collect();
    if !named.is_empty() {
        let mut packages = all();
        packages.retain(|package| named.iter().any(|name| package.is_named(name)));
        packages
    } else if words.contains(&"--workspace") {
        all()
    } else {
        members("default-members")
            .iter()
            .map(|folder| Package::read(folder))
            .collect()
    }
}

pub(crate) fn all() -> Vec<Package> {
    let root = Package::read(".");
    let others = members("members");
    let others = others.iter().map(|folder| Package::read(folder));
    [root].into_iter().chain(others).collect()
}

impl Package {
    fn read(folder: &str) -> Self {
        let folder = match folder {
            "." => String::new(),
            _ => format!("{folder}/"),
        };
        let manifest = read(&format!("{folder}Cargo.toml"));
        Self { folder, manifest }
    }

    pub(crate) fn is_named(&self, name: &str) -> bool {
        let (_, package) = self.manifest.split_once("[package]\n").unwrap();
        package.starts_with(&format!("name = \"{name}\"\n"))
    }

    /// Whether cargo finds this program: `example`, `bench` or `test`.
    pub(crate) fn has(&self, kind: &str, name: &str) -> bool {
        let standard = match kind {
            "bench" => "benches".to_owned(),
            _ => format!("{kind}s"),
        };
        let [file, program] = ["", "/main"].map(|main| {
            let path = format!("{}{standard}/{name}{main}.rs", self.folder);
            exists(&path)
        });
        let is_found = !self.manifest.contains(&format!("auto{standard} = false"));
        let listed = format!("[[{kind}]]\nname = \"{name}\"\n");
        is_found && (file || program) || self.manifest.contains(&listed)
    }
}

/// Returns the folders in a list of the workspace.
fn members(list: &str) -> Vec<String> {
    let manifest = read("Cargo.toml");
    let (_, rest) = manifest.split_once(&format!("\n{list} = [\n")).unwrap();
    let (folders, _) = rest.split_once("\n]").unwrap();
    folders
        .lines()
        .map(|line| line.trim().trim_matches(['"', ',']).to_owned())
        .collect()
}

#[test]
fn every_folder_of_tests_with_a_program_belongs_to_a_package() {
    let programs: Vec<String> = crate::files("tests")
        .into_iter()
        .filter_map(|path| {
            Some(
                path.strip_prefix("tests/")?
                    .strip_suffix("/main.rs")?
                    .to_owned(),
            )
        })
        .filter(|name| !name.contains('/'))
        .collect();
    assert!(programs.len() > 10, "{programs:?}");
    for name in programs {
        let packages = all();
        assert!(
            packages.iter().any(|package| package.has("test", &name)),
            "tests/{name}/main.rs is in no Cargo.toml"
        );
    }
}
