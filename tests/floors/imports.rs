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
pub(crate) fn arrows(krate: &Crate) -> BTreeSet<Arrow> {
    let mut arrows = BTreeSet::new();
    for (path, module) in &krate.modules {
        let needed = module
            .imports
            .iter()
            .filter(|import| !import.is_reexport || module.words.contains(&import.name))
            .map(|import| (import.line, &import.path));
        let written = module.paths.iter().map(|(line, path)| (*line, path));
        for (line, written) in needed.chain(written) {
            arrows.extend(arrow(krate, path, line, written));
        }
        arrows.extend(self_call_arrows(krate, module));
    }
    arrows.retain(|arrow| arrow.from != arrow.to);
    arrows
}

/// The arrows that are part of circles, or lead from one circle to another.
pub(crate) fn circular(mut arrows: Vec<Arrow>) -> Vec<Arrow> {
    loop {
        let before = arrows.len();
        let from: BTreeSet<usize> = arrows.iter().map(|arrow| arrow.from).collect();
        let to: BTreeSet<usize> = arrows.iter().map(|arrow| arrow.to).collect();
        arrows.retain(|arrow| from.contains(&arrow.to) && to.contains(&arrow.from));
        if arrows.len() == before {
            return arrows;
        }
    }
}

fn arrow(krate: &Crate, from: &ModulePath, line: usize, written: &[String]) -> Option<Arrow> {
    let (to, item) = match krate.resolve(from, written)? {
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

/// The methods of a type of this module that other files implement, and that this module calls on `self`.
fn self_call_arrows(krate: &Crate, module: &Module) -> Vec<Arrow> {
    let calls = module.paths.iter().filter(|(_, path)| path[0] == "Self");
    let mut arrows = Vec::new();
    for (line, path) in calls {
        for (elsewhere, other) in &krate.modules {
            for methods in &other.methods {
                if methods.names.contains(&path[1])
                    && let Some(Target::Item { file, name }) = krate.resolve(elsewhere, &methods.of)
                    && file == module.file
                {
                    arrows.push(Arrow {
                        from: module.file,
                        to: other.file,
                        line: *line,
                        item: format!("{name}::{}", path[1]),
                    });
                }
            }
        }
    }
    arrows
}
