//! Which file needs which other one, for which item.

use std::collections::BTreeSet;

use crate::modules::{Crate, Module, ModulePath, Target};

/// A file mentions an item that another file defines.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Arrow {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) line: usize,
    pub(crate) item: String,
}

/// All arrows between the files of a crate, in their order.
///
/// * An import counts for the file that defines the item, however many modules re-export it.
/// * An import of a module counts for nothing; the paths that begin with it do.
/// * A re-export alone is no need: it counts if the code of its file uses the name, too.
/// * A method that is called on `self` counts for the file whose `impl` has it, if that is another file
///   than the type's: a type whose methods are spread over files needs all of them.
pub(crate) fn arrows(krate: &Crate) -> Vec<Arrow> {
    let mut arrows = BTreeSet::new();
    for (path, module) in &krate.modules {
        for import in &module.imports {
            if import.is_reexport && !module.words.contains(&import.name) {
                continue;
            }
            let target = krate.resolve(path, &import.path);
            if import.name == "*" {
                arrows.extend(glob_arrows(krate, module, import.line, target));
            } else if let Some(target) = target {
                arrows.extend(arrow(krate, path, import.line, target));
            }
        }
        for (line, written) in &module.paths {
            if let Some(target) = krate.resolve(path, written) {
                arrows.extend(arrow(krate, path, *line, target));
            }
        }
        arrows.extend(self_call_arrows(krate, path, module));
    }
    let mut arrows: Vec<_> = arrows.into_iter().collect();
    arrows.retain(|arrow| arrow.from != arrow.to);
    arrows
}

fn arrow(krate: &Crate, from: &ModulePath, line: usize, target: Target) -> Option<Arrow> {
    let (to, item) = match target {
        Target::Item { file, name } => (file, name),
        Target::Module(_) => return None,
        Target::Hidden(module) => (krate.modules.get(&module)?.file, module.join("::")),
    };
    let from = krate.modules[from].file;
    Some(Arrow {
        from,
        to,
        line,
        item,
    })
}

/// A glob stands for each word of the file that it binds.
fn glob_arrows(krate: &Crate, module: &Module, line: usize, target: Option<Target>) -> Vec<Arrow> {
    let from = module.file;
    let found = |to, item| Arrow {
        from,
        to,
        line,
        item,
    };
    match target {
        Some(Target::Item { file, name }) => vec![found(file, name)],
        Some(Target::Module(inner)) => {
            let own = |word: &&String| !module.items.iter().any(|item| &item.name == *word);
            let resolve = |word: &String| krate.resolve(&inner, &["self".to_owned(), word.clone()]);
            let words = module.words.iter().filter(own);
            words
                .filter_map(resolve)
                .filter_map(|target| match target {
                    Target::Item { file, name } => Some(found(file, name)),
                    _ => None,
                })
                .collect()
        }
        _ => Vec::new(),
    }
}

/// The methods of a type of this module that other files implement, and that this module calls on `self`.
fn self_call_arrows(krate: &Crate, path: &ModulePath, module: &Module) -> Vec<Arrow> {
    let mut arrows = Vec::new();
    let types: Vec<&str> = module.items.iter().map(|item| item.name.as_str()).collect();
    for (elsewhere, other) in &krate.modules {
        for methods in &other.methods {
            let Some(Target::Item { file, name }) = krate.resolve(elsewhere, &methods.of) else {
                continue;
            };
            if file != module.file || !types.contains(&name.as_str()) || elsewhere == path {
                continue;
            }
            let calls = module.self_calls.iter();
            arrows.extend(
                calls
                    .filter(|(_, called)| methods.names.contains(called))
                    .map(|(line, called)| Arrow {
                        from: module.file,
                        to: other.file,
                        line: *line,
                        item: format!("{name}::{called}"),
                    }),
            );
        }
    }
    arrows
}
